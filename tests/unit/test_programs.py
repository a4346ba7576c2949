"""Kinds of programs: what a call may be, and that nobody decides by a name what a record says."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import SPECS, decoder_of, states_of, token_ids
from torch import Tensor

from exporter.backends import FIRST, formats
from exporter.errors import RuntimeLimitError
from exporter.graph.contract import ProgramContract
from exporter.optional import optional
from exporter.programs import Limits, interface, run_kind
from exporter.spec import MAIN, PREFILL, PROGRAMS, ProgramKind, program_for
from runtime_ref.programs import CheckedProgram, EagerProgram

ROOT = Path(__file__).parents[2]
SCORE = ProgramKind(name="score", min_query_len=2, max_query_len=None, write_first=False, logits="all")
"""A kind that no bundle has yet: logits of every token."""


def test_the_programs_of_a_bundle() -> None:
    assert list(PROGRAMS) == ["prefill", "main"] and {kind.name: kind for kind in (PREFILL, MAIN)} == PROGRAMS
    assert (PREFILL.min_query_len, PREFILL.max_query_len, PREFILL.write_first, PREFILL.logits) == (
        2, None, False, "last"
    )  # fmt: skip
    assert (MAIN.min_query_len, MAIN.max_query_len, MAIN.write_first, MAIN.logits) == (1, 1, True, "last")


@pytest.mark.parametrize(
    ("kind", "chunk", "context", "expected"),
    [
        (PREFILL, 512, 8192, (2, 512)), (PREFILL, 512, 64, (2, 64)), (PREFILL, 2, 2, (2, 2)),
        (MAIN, 512, 8192, (1, 1)), (MAIN, 2, 2, (1, 1)),
    ],
)  # fmt: skip
def test_the_range_of_query_len(kind: ProgramKind, chunk: int, context: int, expected: tuple[int, int]) -> None:
    assert kind.query_range(chunk, context) == expected


@given(st.integers(0, 2000))
def test_every_call_has_exactly_one_program(query_len: int) -> None:
    takers = [kind for kind in PROGRAMS.values() if kind.takes(query_len)]
    assert takers == ([] if query_len == 0 else [MAIN] if query_len == 1 else [PREFILL])
    for kind in takers:
        assert program_for(query_len) is kind
        kind.check_call(query_len, query_len)


def test_the_program_for_a_call_is_one_of_the_last_tokens_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROGRAMS, "score", SCORE)
    assert SCORE.takes(5) and program_for(5, ["score", "prefill", "main"]) is PREFILL
    assert program_for(1, ["main"]) is MAIN


@pytest.mark.parametrize(
    ("kind", "query_len", "message"),
    [
        (MAIN, 2, "program main: got 2 tokens; expected exactly 1. Run chunks through `prefill`."),
        (MAIN, 40, "program main: got 40 tokens; expected exactly 1. Run chunks through `prefill`."),
        (PREFILL, 1, "program prefill: got 1 token; expected 2 or more. Run single tokens through `main`."),
        (MAIN, 0, "program main: got 0 tokens; expected exactly 1. Give it at least one token."),
    ],
)
def test_a_call_of_another_length_is_refused_with_the_program_to_take(
    kind: ProgramKind, query_len: int, message: str
) -> None:
    with pytest.raises(RuntimeLimitError) as caught:
        kind.check_call(query_len, query_len + 3)
    assert str(caught.value) == message


def test_a_kind_with_a_bound_names_both_ends() -> None:
    pair = ProgramKind(name="pair", min_query_len=2, max_query_len=3, write_first=False, logits="last")
    assert [n for n in range(6) if pair.takes(n)] == [2, 3] and pair.query_range(512, 8192) == (2, 3)
    with pytest.raises(RuntimeLimitError, match=r"got 4 tokens; expected 2 or 3\. Run chunks through `prefill`"):
        pair.check_call(4, 4)


def test_fewer_tokens_in_all_than_in_the_call_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="2 tokens after a call with 3"):
        PREFILL.check_call(3, 2)


@pytest.mark.parametrize(("least", "most"), [(1, 2), (2, 2), (2, None), (1, None)])
def test_writing_first_takes_one_token(least: int, most: int | None) -> None:
    with pytest.raises(AssertionError, match="replaces rows its own early tokens need"):
        ProgramKind(name="mistake", min_query_len=least, max_query_len=most, write_first=True, logits="last")


def test_a_program_of_any_format_is_called_by_the_convention_of_its_kind() -> None:
    """It is refused before the program sees it: no state is touched."""
    calls: list[tuple[str, int]] = []

    def method(name: str) -> object:
        def run(input_ids: Tensor, position_ids: Tensor, *states: Tensor) -> Tensor:
            calls.append((name, input_ids.shape[1]))
            return torch.zeros(1, 3)

        return run

    program = CheckedProgram(EagerProgram({name: method(name) for name in PROGRAMS}))  # type: ignore[misc]
    for name, query_len, allowed in (
        ("main", 1, True), ("main", 2, False), ("prefill", 2, True), ("prefill", 1, False),
    ):  # fmt: skip
        ids, positions = torch.zeros(1, query_len, dtype=torch.int64), torch.zeros(1, 9, dtype=torch.int64)
        if allowed:
            assert program.run(name, ids, positions, []).shape == (1, 3)
        else:
            with pytest.raises(RuntimeLimitError, match=f"program {name}"):
                program.run(name, ids, positions, [])
    assert calls == [("main", 1), ("prefill", 2)]


def test_logits_of_all_tokens_are_those_of_every_last_one() -> None:
    """And the same states: a kind that gives them differs in nothing else."""
    decoder, ids = decoder_of(SPECS["config T"], slack=2), token_ids(20)
    every, last = states_of(decoder), states_of(decoder)
    start = 0
    for length in (5, 2, 13):
        chunk = torch.tensor([ids[start : start + length]])
        start += length
        positions = torch.zeros(1, start, dtype=torch.int64)
        with torch.no_grad():
            scored = run_kind(decoder, SCORE, chunk, positions, every)
            wanted = run_kind(decoder, PREFILL, chunk, positions, last)
        assert scored.shape == (1, length, SPECS["config T"].vocab_size)
        torch.testing.assert_close(scored[:, -1], wanted, atol=1e-5, rtol=0)
    assert all(torch.equal(a, b) for a, b in zip(every, last, strict=True))


def test_the_interface_of_a_kind_follows_from_its_record() -> None:
    decoder, limits = decoder_of(SPECS["config T"]), Limits(max_context_length=64, max_prefill_chunk=24)
    forms = {}
    for kind in (PREFILL, MAIN, SCORE):
        method = interface(decoder.states, 97, kind, limits)
        contract = ProgramContract(kind.name, method, decoder.states)
        forms[kind.name] = (method.inputs[0].shape, method.outputs[0].shape, method.dims.get("query_len"))
        assert (contract.write_first, contract.last_token_only) == (kind.write_first, kind.logits == "last")
        assert contract.query == kind.query_range(24, 64) and contract.sequence == (kind.min_query_len, 64)
        assert contract.vocab_size == 97
    assert forms == {
        "prefill": ((1, "query_len"), (1, 97), (2, 24)),
        "main": ((1, 1), (1, 97), None),
        "score": ((1, "query_len"), (1, "query_len", 97), (2, 24)),
    }


def sources() -> Iterator[tuple[str, ast.Module]]:
    for part in ("exporter", "runtime_ref"):
        for path in sorted((ROOT / part).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def compared(tree: ast.AST) -> Iterator[str]:
    """The text constants that something is compared with, or matched against."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare | ast.MatchValue):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                    yield inner.value


def test_nothing_compares_a_name_with_that_of_a_program() -> None:
    assert list(compared(ast.parse("if method in ('main', other): pass\nx = name != 'prefill'"))) == ["main", "prefill"]
    found = {name for name, tree in sources() if set(compared(tree)) & PROGRAMS.keys()}
    assert found == set()


FORMAT_NAMES = {
    "exporter/backends/__init__.py": {FIRST},  # the format of an export that names none
    "exporter/quantization/matrices.py": {"coreml", "coreai"},  # which grid a word of a format's options stands for
    "runtime_ref/bench_report.py": {"executorch"},  # the Python distribution, whose version is recorded
}
"""Where else the name of a format stands, and why."""


def test_the_name_of_a_format_stands_in_its_own_folder_alone() -> None:
    """Neither compared with nor looked up by: what differs between formats is in their traits."""
    found: dict[str, set[str]] = {}
    for path, tree in sources():
        extras = {
            id(argument)  # `optional` takes the pip extra that brings a package
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == optional.__name__
            for argument in node.args[1:]
        }
        names = {
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and node.value in formats() and id(node) not in extras
        }
        names = {name for name in names if not path.startswith(f"exporter/backends/{name}/")}
        if names:
            found[path] = names
    assert found == FORMAT_NAMES
