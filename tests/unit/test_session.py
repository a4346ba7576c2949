"""Sessions against the uncached oracle, whatever the order of prefill, decode, rewind, reuse, fork and restore."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from toy import VOCAB, oracle, toy_bundle, toy_manifest, toy_program

from exporter.errors import BundleError, RuntimeLimitError
from exporter.spec import Manifest
from runtime_ref import load
from runtime_ref.programs import CheckedProgram
from runtime_ref.score import score
from runtime_ref.session import Session

MIXED = ("ring", "full", "ring")
IDS = torch.randint(0, VOCAB, (96,), generator=torch.Generator().manual_seed(3)).tolist()


def new_session(manifest: Manifest, poison: bool = True) -> Session:
    """A session whose attention caches start as garbage: whoever reads a row that was never written is found out."""
    session = Session(manifest, toy_program(manifest))
    if poison:
        for spec, tensor in zip(manifest.states, session.state.tensors, strict=True):
            if spec.kind != "conv":
                tensor.fill_(1e3)
    return session


def assert_oracle(manifest: Manifest, ids: list[int], logits: Tensor) -> None:
    assert logits.shape == (VOCAB,)
    torch.testing.assert_close(logits, oracle(manifest, ids)[-1], atol=1e-3, rtol=1e-4)


@settings(max_examples=25, deadline=None)
@given(
    splits=st.lists(st.tuples(st.integers(1, 24), st.integers(1, 16)), min_size=1, max_size=4),
    slack=st.sampled_from([0, 3]),
)
def test_any_split_into_prompts_and_chunks_equals_the_oracle(splits: list[tuple[int, int]], slack: int) -> None:
    manifest = toy_manifest((*MIXED, "conv"), window=5, slack=slack)
    session, seen = new_session(manifest), 0
    for count, chunk in splits:
        logits = session.prefill(IDS[seen : seen + count], chunk)
        seen += count
        assert_oracle(manifest, IDS[:seen], logits)


@settings(max_examples=40, deadline=None)
@given(
    slack=st.sampled_from([0, 1, 6]),
    window=st.sampled_from([1, 4, 7]),
    steps=st.lists(
        st.tuples(st.sampled_from(["prefill", "decode", "rewind", "reuse", "fork"]), st.integers(1, 14)),
        min_size=2,
        max_size=7,
    ),
    data=st.data(),
)
def test_whatever_is_rewound_or_reused_equals_a_cold_run(
    slack: int, window: int, steps: list[tuple[str, int]], data: st.DataObject
) -> None:
    manifest = toy_manifest(MIXED, window=window, slack=slack, context=128)
    session = new_session(manifest)
    seen: list[int] = []
    token = st.integers(0, VOCAB - 1)
    for step, count in steps:
        if step == "rewind":
            back = min(count, max(session.state.max_rewind, 0))
            session.rewind(back)
            seen = seen[: len(seen) - back]
            continue
        if step == "fork":
            abandoned, session = session, session.fork()
            abandoned.decode(0)  # whatever it writes must not reach the fork
            continue
        fresh = data.draw(st.lists(token, min_size=count, max_size=count))
        if step == "reuse":
            keep = data.draw(st.integers(0, len(seen)))
            seen = (seen[:keep] + fresh)[: data.draw(st.integers(1, keep + count))]
            logits = session.prefill(seen, chunk=5, reuse=True)
        elif step == "decode":
            seen = [*seen, fresh[0]]
            logits = session.decode(fresh[0])
        else:
            seen = seen + fresh
            logits = session.prefill(fresh, chunk=6)
        assert_oracle(manifest, seen, logits)
        assert session.state.tokens == seen


def test_a_prefix_is_kept_where_it_can_be() -> None:
    manifest = toy_manifest(("full",))
    session, calls = new_session(manifest), []
    session.prefill(IDS[:30])
    session.observer = lambda position, _: calls.append(position)
    logits = session.prefill([*IDS[:20], 1, 2], reuse=True)
    assert calls == [21]
    assert_oracle(manifest, [*IDS[:20], 1, 2], logits)
    calls.clear()
    assert_oracle(manifest, IDS[:20], session.prefill(IDS[:20], reuse=True))  # the last token always runs again
    assert calls == [19]


def test_a_second_turn_past_the_wrap_keeps_the_first() -> None:
    manifest = toy_manifest(MIXED, window=8)
    session, calls = new_session(manifest), []
    session.prefill(IDS[:40])
    session.observer = lambda position, _: calls.append(position)
    assert_oracle(manifest, IDS[:46], session.prefill(IDS[:46], reuse=True))
    assert calls == [45]
    calls.clear()
    other = [*IDS[:20], *IDS[50:60]]  # diverges where the ring has forgotten: everything runs again
    assert_oracle(manifest, other, session.prefill(other, chunk=10, reuse=True))
    assert calls == [9, 19, 29]


def test_chunks_of_one_and_a_last_piece_of_one_go_through_main() -> None:
    manifest = toy_manifest(MIXED)
    session, calls = new_session(manifest), []
    program = session.program

    class Spy:
        def run(self, method: str, input_ids: Tensor, position_ids: Tensor, states: Sequence[Tensor]) -> Tensor:
            calls.append((method, input_ids.shape[1], position_ids.tolist()[0]))
            return program.run(method, input_ids, position_ids, states)

    session.program = Spy()
    session.prefill(IDS[:5], 2)
    session.prefill(IDS[5:7], 1)
    assert [(method, count) for method, count, _ in calls] == [
        ("prefill", 2), ("prefill", 2), ("main", 1), ("main", 1), ("main", 1)
    ]  # fmt: skip
    assert [positions for *_, positions in calls] == [list(range(n)) for n in (2, 4, 5, 6, 7)]
    calls.clear()
    session.prefill(IDS[7:27])
    assert [count for _, count, _ in calls] == [16, 4]  # the bundle's largest chunk


@pytest.mark.parametrize(
    ("ids", "chunk", "message"),
    [
        ([], None, "no tokens"),
        ([1, VOCAB], None, f"token id {VOCAB}"),
        ([-1], None, "token id -1"),
        ([1], 0, "chunk 0"),
        ([1], 17, "expected 1 to 16"),
        ([1] * 27, None, "27 tokens after 70"),
    ],
)
def test_refused_before_anything_is_touched(ids: list[int], chunk: int | None, message: str) -> None:
    manifest = toy_manifest(MIXED)
    session = new_session(manifest)
    session.prefill(IDS[:70])
    before = [t.clone() for t in session.state.tensors]
    with pytest.raises(RuntimeLimitError, match=message):
        session.prefill(ids, chunk)
    assert session.length == 70
    assert all(torch.equal(a, b) for a, b in zip(before, session.state.tensors, strict=True))
    assert_oracle(manifest, [*IDS[:70], 5], session.decode(5))


def test_two_turns_fill_the_context_and_the_next_token_is_refused() -> None:
    manifest = toy_manifest(MIXED, context=64)
    session = new_session(manifest)
    session.prefill(IDS[:20])  # longer than the window of 8
    session.prefill(IDS[20:64])
    with pytest.raises(RuntimeLimitError, match="1 tokens after 64"):
        session.decode(1)
    assert session.length == 64
    with pytest.raises(RuntimeLimitError, match="65 tokens after 0"):
        session.prefill([*IDS[:65]], reuse=True)
    assert session.length == 64


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), RuntimeError("kernel")])
def test_an_interrupted_call_resets_the_session(failure: BaseException) -> None:
    manifest = toy_manifest(MIXED)
    session = new_session(manifest)
    session.prefill(IDS[:10])
    program = session.program

    class Fails:
        def run(self, method: str, input_ids: Tensor, position_ids: Tensor, states: Sequence[Tensor]) -> Tensor:
            program.run(method, input_ids, position_ids, states)
            raise failure

    session.program = Fails()
    with pytest.raises(type(failure)):
        session.decode(3)
    assert session.length == 0
    session.program = program
    assert_oracle(manifest, IDS[:12], session.prefill(IDS[:12]))


def test_a_saved_conversation_goes_on_in_another_session(tmp_path: Path) -> None:
    manifest = toy_manifest((*MIXED, "conv"))
    session = new_session(manifest)
    session.prefill(IDS[:33])
    session.save(tmp_path / "talk")
    other = new_session(manifest)
    other.load_state(tmp_path / "talk")
    assert torch.equal(other.decode(9), session.decode(9))
    other.reset()
    assert_oracle(manifest, IDS[:4], other.prefill(IDS[:4]))


def test_prefill_and_main_refuse_each_others_lengths() -> None:
    manifest = toy_manifest(MIXED)
    program, states = CheckedProgram(toy_program(manifest)), Session(manifest, toy_program(manifest)).state.tensors
    two, one = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(RuntimeLimitError, match=r"program main: got 2 tokens; expected exactly 1. .*`prefill`"):
        program.run("main", two, two, states)
    with pytest.raises(RuntimeLimitError, match=r"program prefill: got 1 token; expected 2 or more. .*`main`"):
        program.run("prefill", one, two, states)
    with pytest.raises(AssertionError, match="1 tokens after a call with 2"):
        program.run("prefill", two, one, states)


@pytest.mark.parametrize(("prefill", "chunk"), [(0, 1), (1, 4), (23, 7), (40, 16)])
def test_scores_are_those_of_the_oracle(prefill: int, chunk: int) -> None:
    manifest, ids = toy_manifest(MIXED), IDS[:40]
    arrays = score(new_session(manifest), ids, prefill=prefill, chunk=chunk, keep_logits=True)
    ends = [min(start + chunk, prefill) - 1 for start in range(0, prefill, chunk)]
    assert arrays["position"].tolist() == ends + list(range(prefill, 40))
    want = oracle(manifest, ids)[arrays["position"]]
    torch.testing.assert_close(torch.from_numpy(arrays["logits"]), want, atol=1e-3, rtol=1e-4)
    following = [float(torch.log_softmax(row, 0)[ids[p + 1]]) if p < 39 else float("nan")
                 for p, row in zip(arrays["position"].tolist(), want, strict=True)]  # fmt: skip
    assert arrays["logprob"].tolist() == pytest.approx(following, abs=1e-3, nan_ok=True)
    assert arrays["argmax"].tolist() == arrays["top_ids"][:, 0].tolist() == want.argmax(1).tolist()
    assert arrays["top_ids"].shape == (len(want), 16)
    assert (arrays["top_logits"] == -np.sort(-arrays["logits"], axis=1)[:, :16]).all()
    assert {name: str(a.dtype) for name, a in arrays.items()} == {
        "position": "int64", "logprob": "float32", "argmax": "int64", "top_ids": "int64", "top_logits": "float32",
        "logits": "float32",
    }  # fmt: skip


def test_load_says_what_is_wrong_with_a_bundle(tmp_path: Path) -> None:
    toy_bundle(tmp_path / "toy")
    with pytest.raises(BundleError, match=r"model\.pte"):
        load(tmp_path / "toy")  # whole, but its program is none
    manifest = toy_manifest()
    (program,) = manifest.programs
    bare = program.model_copy(update={"methods": {}})
    toy_bundle(tmp_path / "toy", manifest.model_copy(update={"programs": (bare,)}))
    with pytest.raises(BundleError, match="a program with the methods prefill and main"):
        load(tmp_path / "toy")
