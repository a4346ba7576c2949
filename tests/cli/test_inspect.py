"""``inspect --check``: bundles and bare program files held to a contract, for people and for machines."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import CHUNK, CONTEXT, WINDOW
from test_exporter import refused, run
from toy import VOCAB

from exporter.backends import traits
from exporter.backends.executorch.file import read_pte
from exporter.graph.contract import MIN_DELEGATED_SHARE
from exporter.spec.checks import TRACED_CHECKS

RING = {"kind": "ring", "rows": WINDOW, "row_shape": [2, 16]}
FULL = {"kind": "full", "row_shape": [2, 16]}
PROGRAM: dict[str, Any] = {
    "max_context_length": CONTEXT, "max_prefill_chunk": CHUNK, "vocab_size": VOCAB + 1, "layers": [RING, FULL, RING],
}  # fmt: skip


BOTH = ("prefill", "main")


def contract(folder: Path, **content: Any) -> Path:
    path = folder / "contract.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def inspected(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], code: int, *argv: object
) -> dict[str, Any]:
    """What is printed as JSON, after the exit code was seen."""
    assert run(monkeypatch, "inspect", *argv, "--format", "json") == code
    printed: dict[str, Any] = json.loads(capfd.readouterr().out)
    assert printed["passed"] == (code == 0) == all(check["passed"] for check in printed["checks"])
    return printed


def failed(printed: dict[str, Any]) -> set[tuple[str, str]]:
    return {(check["program"], check["name"]) for check in printed["checks"] if not check["passed"]}


@pytest.mark.parametrize("bare", [False, True], ids=["bundle", "pte"])
def test_as_a_process_of_its_own(tiny_bundle: Path, tmp_path: Path, bare: bool) -> None:
    """Nothing that another import of this process registered is needed, and stdout is JSON and nothing else."""
    argv = [str(tiny_bundle / "model.pte"), "--check", str(contract(tmp_path, program=PROGRAM))]
    ran = subprocess.run(
        [sys.executable, "-m", "exporter", "inspect", *(argv if bare else [str(tiny_bundle)]), "--format", "json"],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    printed = json.loads(ran.stdout)
    assert failed(printed) == set() and ran.returncode == 0
    names = {form: {c["name"] for c in printed["checks"] if c["form"] == form} for form in ("traced", "file")}
    assert names == {"traced": set() if bare else set(TRACED_CHECKS), "file": set(traits("executorch").checks)}


def test_facts_are_those_of_the_file(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tiny_bundle: Path
) -> None:
    (facts,) = inspected(monkeypatch, capfd, 0, tiny_bundle)["files"]
    data = (tiny_bundle / "model.pte").read_bytes()
    file = read_pte(data)
    assert (facts["file"], facts["format"], facts["file_bytes"]) == ("model.pte", "executorch", len(data))
    assert facts["weight_bytes"] == {"constants": file.constant_bytes, "named, of delegates": file.named_bytes}
    functions = {function["name"]: function for function in facts["functions"]}
    assert set(functions) == set(file.plans) == set(BOTH)
    for name, plan in file.plans.items():
        assert functions[name]["planned_bytes"] == plan.planned_bytes > 0
        operators = functions[name]["operators"]
        assert set(operators) == {*plan.operators_called(), "XnnpackBackend"}
        assert operators["XnnpackBackend"] == len(plan.delegate_calls) > 0
        assert sum(operators.values()) == len(plan.kernel_calls) + len(plan.delegate_calls)
    assert functions["main"]["operators"]["llama::update_cache.out"] == 6  # keys and values of three layers
    rows = [["input 0", "long", "[1, 1]"], ["input 1", "long", f"up to [1, {CONTEXT}]"]]
    ring, full = ["float", f"[1, {WINDOW}, 2, 16]"], ["float", f"up to [1, {CONTEXT}, 2, 16]"]
    rows += [[f"input {2 + i}", *row] for i, row in enumerate([ring, ring, full, full, ring, ring])]
    assert functions["main"]["inputs"] == rows and functions["main"]["states"] == []
    assert functions["main"]["outputs"] == [["output 0", "float", f"[1, {VOCAB + 1}]"]]
    assert functions["prefill"]["inputs"][0] == ["input 0", "long", f"up to [1, {CHUNK}]"]


def test_tables_of_a_bare_file(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tiny_bundle: Path, tmp_path: Path
) -> None:
    code = run(monkeypatch, "inspect", tiny_bundle / "model.pte", "--check", contract(tmp_path, program=PROGRAM))
    printed = capfd.readouterr().out
    assert code == 0 and "FAILED" not in printed
    assert "main, planned beside the states" in printed and all(
        check in printed for check in traits("executorch").checks
    )


WIDER = {"program": PROGRAM | {"layers": [RING | {"rows": WINDOW + 1}, FULL, RING | {"rows": WINDOW + 1}]}}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"min_delegated_share": {"main": 0.99}}, {("main", "delegated_share")}),
        ({"max_planned_bytes": {"prefill": 1000}}, {("prefill", "planned_bytes")}),
        ({"max_file_bytes": 1000}, {("main+prefill", "file_bytes")}),
        ({"allowed_operators": ["aten::add.out"]}, {(m, "operators_in_registry") for m in BOTH}),
        (WIDER, {(m, c) for m in ("prefill", "main") for c in ("dynamic_ranges", "write_index_is_definition")}),
        ({"program": PROGRAM | {"max_context_length": 2 * CONTEXT}}, {(m, "dynamic_ranges") for m in BOTH}),
        ({"program": PROGRAM | {"max_prefill_chunk": CHUNK + 1}}, {("prefill", "dynamic_ranges")}),
        ({"program": PROGRAM | {"vocab_size": VOCAB}}, {(m, "last_token_logits_only") for m in BOTH}),
    ],
)  # fmt: skip
def test_a_property_that_fails_exits_with_1(
    *, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tiny_bundle: Path, tmp_path: Path,
    content: dict[str, Any], expected: set[tuple[str, str]],
) -> None:  # fmt: skip
    both = {"program": PROGRAM} | content
    assert failed(inspected(monkeypatch, capfd, 1, tiny_bundle, "--check", contract(tmp_path, **content))) == expected
    path = tiny_bundle / "model.pte"
    assert failed(inspected(monkeypatch, capfd, 1, path, "--check", contract(tmp_path, **both))) == expected
    others = sorted(set(traits("executorch").checks) - {name for _, name in expected})
    # Without the check its limit has nothing to say and would be refused: only the form of the program stays.
    only_form = {"program": both["program"], "checks": others}
    printed = inspected(monkeypatch, capfd, 0, path, "--check", contract(tmp_path, **only_form))
    assert {check["name"] for check in printed["checks"]} == set(others)


def test_a_bundle_may_be_asked_for_what_was_recorded_alone(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tiny_bundle: Path, tmp_path: Path
) -> None:
    check = contract(tmp_path, checks=["writes_land_on_their_rows"])
    printed = inspected(monkeypatch, capfd, 0, tiny_bundle, "--check", check)
    assert [(c["form"], c["program"], c["name"]) for c in printed["checks"]] == [
        ("traced", method, "writes_land_on_their_rows") for method in BOTH
    ]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "without a manifest and no contract"),
        ({"max_file_bytes": 1}, "a program file without a manifest and a contract without a `program`;"),
        ({"program": PROGRAM, "checks": ["ring_order"]}, "not ring_order"),
        ({"program": PROGRAM, "checks": ["writes_land_on_their_rows"]}, "which did not run"),
        ({"program": PROGRAM, "limit": 1}, "unknown key 'limit'"),
        ({"program": PROGRAM, "max_planned_bytes": {"decode": 1}}, "max_planned_bytes for decode"),
        ({"program": PROGRAM, "runtime": "executorch-0.1"}, "runtime 'executorch-0.1'"),
        ({"program": PROGRAM | {"layers": [RING, FULL]}}, "8 inputs of method prefill; expected 6"),
    ],
)
def test_a_users_mistake_exits_with_2(
    *, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tiny_bundle: Path, tmp_path: Path,
    content: dict[str, Any] | None, complaint: str,
) -> None:  # fmt: skip
    check = () if content is None else ("--check", contract(tmp_path, **content))
    assert complaint in refused(monkeypatch, capfd, "inspect", tiny_bundle / "model.pte", *check)


@pytest.mark.parametrize("name", ["none.pte", "empty.pte", "noise.pte", "short.pte"])
def test_a_file_that_is_no_program_exits_with_2(
    *, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tiny_bundle: Path, tmp_path: Path, name: str,
) -> None:  # fmt: skip
    data = (tiny_bundle / "model.pte").read_bytes()
    contents = {"empty.pte": b"", "noise.pte": bytes(range(256)) * 99, "short.pte": data[: len(data) // 2]}
    if name in contents:
        (tmp_path / name).write_bytes(contents[name])
    check = contract(tmp_path, program=PROGRAM)
    message = refused(monkeypatch, capfd, "inspect", tmp_path / name, "--check", check)
    assert name in message or "pte reader" in message


def test_an_unknown_format_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tiny_bundle: Path
) -> None:
    assert run(monkeypatch, "inspect", tiny_bundle, "--format", "xml") == 2
    assert "xml" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["tiny_bundle", "llama_bundle"])
def test_the_floor_is_just_below_what_is_delegated(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest, name: str
) -> None:
    """Every export meets the floor; a lowering that delegates half as much does not."""
    printed = inspected(monkeypatch, capfd, 0, request.getfixturevalue(name))
    shares = {}
    for check in printed["checks"]:
        if check["name"] == "delegated_share":
            inside, outside = (int(n) for n in re.findall(r"(\d+) (?:operators|kernels)", check["evidence"]))
            shares[check["program"]] = inside / (inside + outside)
    assert set(shares) == set(MIN_DELEGATED_SHARE)
    for method, floor in MIN_DELEGATED_SHARE.items():
        assert shares[method] / 2 < floor < shares[method]
