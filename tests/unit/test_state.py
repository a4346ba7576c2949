"""The caller's state: sizes, growth, what a rewind may do, the file it is kept in."""

import errno
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import DTYPES, CacheDType
from toy import DIM, toy_manifest

from exporter.backends.executorch.options import ExecutorchOptions
from exporter.errors import RuntimeLimitError
from exporter.machine import resident_bytes
from exporter.spec import Manifest, QuantizationSpec
from runtime_ref.memory import context_costs, planned_usage
from runtime_ref.state import Growth, State
from runtime_ref.state_file import StateFileError

ROW = DIM * 4  # bytes


def mark(state: State, count: int) -> None:
    """Write `count` tokens as the programs would, each row holding its own position."""
    state.ensure_rows(state.length + count)
    for position in range(state.length, state.length + count):
        for tensor in state.tensors:
            tensor[:, position % tensor.shape[1]] = position
    state.advance([7] * count)


def test_first_sizes_are_those_of_the_manifest() -> None:
    state = State(toy_manifest(("ring", "full", "conv"), window=8, slack=2))
    assert [tuple(t.shape) for t in state.tensors] == [(1, 10, 1, 8)] * 2 + [(1, 4, 1, 8)] * 2 + [(1, 2, 8)]
    assert all(t.dtype == torch.float32 and not t.any() and t.is_contiguous() for t in state.tensors)


def test_only_full_states_grow_and_their_rows_stay() -> None:
    state = State(toy_manifest(("ring", "full", "conv"), context=40))
    mark(state, 3)
    before = [t.clone() for t in state.tensors]
    state.ensure_rows(9)
    assert [t.shape[1] for t in state.tensors] == [8, 8, 16, 16, 2]
    for old, new in zip(before, state.tensors, strict=True):
        assert torch.equal(new[:, : old.shape[1]], old)
    state.ensure_rows(9)
    state.ensure_rows(40)
    assert state.tensors[2].shape[1] == 40  # the limit, not the next power of two
    assert state.growths == [Growth(9, 4, 16), Growth(40, 16, 40)]
    state.reset()
    assert [t.shape[1] for t in state.tensors] == [8, 8, 4, 4, 2]
    assert not any(t.any() for t in state.tensors)
    assert state.growths == []


def test_rows_take_memory_when_they_are_written_and_give_it_back() -> None:
    rows, tolerance = 2**21, 2**21  # of 64 MiB a tensor
    state = State(toy_manifest(("full",), context=rows))
    before = resident_bytes()
    state.ensure_rows(rows)
    assert resident_bytes() - before < tolerance
    state.tensors[0][:, : rows // 2] = 1.0
    state.advance([7] * (rows // 2))
    assert abs(resident_bytes() - before - rows // 2 * ROW) < tolerance + 8 * rows  # the tokens' list
    twin = state.fork()
    assert abs(resident_bytes() - before - 3 * rows // 2 * ROW) < 2 * tolerance + 24 * rows  # all used rows of both
    assert torch.equal(twin.tensors[0], state.tensors[0])
    del twin
    state.reset()
    assert resident_bytes() - before < tolerance + 24 * rows


@settings(deadline=None)
@given(
    window=st.integers(1, 5),
    slack=st.integers(0, 3),
    steps=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=6),
)
def test_rewind_is_allowed_exactly_when_the_rows_are_there(
    window: int, slack: int, steps: list[tuple[int, int]]
) -> None:
    """Held against the rows themselves: each says which position it belongs to."""
    state = State(toy_manifest(("ring",), window=window, slack=slack))
    keys, capacity = state.tensors[0], window + slack
    for count, back in steps:
        mark(state, count)
        target = state.length - back
        if target <= 0:
            continue
        needed = range(max(0, target - window + 1), target)
        resident = all(int(keys[0, p % capacity, 0, 0]) == p for p in needed)
        before = state.length
        if resident:
            state.rewind(back)
            assert state.length == target
        else:
            with pytest.raises(RuntimeLimitError):
                state.rewind(back)
            assert state.length == before


def test_a_refused_rewind_names_what_is_left() -> None:
    state = State(toy_manifest(("ring", "full"), window=8, slack=2))
    mark(state, 30)
    assert state.max_rewind == 3
    with pytest.raises(RuntimeLimitError, match=r"at most 3, or all 30, because position 20 is the oldest"):
        state.rewind(4)
    state.rewind(3)
    # Rows lost to the 30 tokens stay lost, though only 27 are left.
    with pytest.raises(RuntimeLimitError, match="at most 0, or all 27, because position 20"):
        state.rewind(1)
    mark(state, 1)
    assert state.max_rewind == 1


def test_a_window_of_one_is_not_to_blame() -> None:
    manifest = toy_manifest(("ring", "ring"), window=8)
    one = tuple(s.model_copy(update={"window": 1, "rows": 1, "max_rows": 1}) for s in manifest.states[:2])
    state = State(manifest.with_states(one + manifest.states[2:]))
    mark(state, 30)
    with pytest.raises(RuntimeLimitError, match="position 22 is the oldest"):
        state.rewind(2)


def test_what_can_always_be_rewound() -> None:
    full = State(toy_manifest(("full",)))
    mark(full, 50)
    full.rewind(49)
    assert full.length == 1
    unwrapped = State(toy_manifest(("ring",), window=8))
    mark(unwrapped, 8)
    unwrapped.rewind(7)
    assert unwrapped.length == 1
    conv = State(toy_manifest(("ring", "conv"), window=8))
    mark(conv, 5)
    conv.rewind(0)
    with pytest.raises(RuntimeLimitError, match="a convolution keeps no history"):
        conv.rewind(1)
    conv.rewind(5)
    assert conv.length == 0
    assert not conv.tensors[2].any()


@pytest.mark.parametrize("count", [-1, 6])
def test_rewind_past_the_start_is_refused(count: int) -> None:
    state = State(toy_manifest(("full",)))
    mark(state, 5)
    with pytest.raises(RuntimeLimitError, match="0 to 5"):
        state.rewind(count)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fork_shares_nothing(dtype: CacheDType) -> None:
    state = State(toy_manifest(("ring", "full", "conv"), dtype=dtype))
    mark(state, 12)
    before = [t.clone() for t in state.tensors]
    fork = state.fork()
    mark(fork, 20)
    assert state.length == 12
    assert fork.length == 32
    assert len(fork.growths) == 2
    assert len(state.growths) == 1
    assert all(torch.equal(a, b) for a, b in zip(before, state.tensors, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 5, 30])
def test_a_saved_state_comes_back(tmp_path: Path, count: int, dtype: CacheDType) -> None:
    manifest = toy_manifest(("ring", "full", "conv"), dtype=dtype)
    state = State(manifest)
    mark(state, count)
    if count == 30:
        state.rewind(0)
    state.save(tmp_path / "talk.safetensors")
    other = State(manifest)
    mark(other, 50)
    other.load(tmp_path / "talk.safetensors")
    assert other.tokens == state.tokens
    assert other.max_rewind == state.max_rewind
    for a, b in zip(state.tensors, other.tensors, strict=True):
        assert torch.equal(a, b)
    assert [p.name for p in tmp_path.iterdir()] == ["talk.safetensors"]


def test_the_high_water_mark_is_saved(tmp_path: Path) -> None:
    manifest = toy_manifest(("ring",), window=8)
    state = State(manifest)
    mark(state, 30)
    state.rewind(1)
    state.save(tmp_path / "s")
    other = State(manifest)
    other.load(tmp_path / "s")
    assert other.length == 29
    assert other.max_rewind == 0


def others(manifest: Manifest) -> dict[str, Manifest]:
    """What a state of `manifest` must not be loaded into, each differing in one thing."""
    eps = manifest.model.model_copy(update={"norm_eps": 1e-5})  # the states are the same, what they mean is not
    weights = manifest.source.model_copy(update={"files": {"w": "1" * 64}})
    options = ExecutorchOptions(quantization=QuantizationSpec(linear="int8"))
    quantized = manifest.program.model_copy(update={"options": options.model_dump(mode="json")})
    return {
        "window": toy_manifest(("ring", "full"), window=7),
        "cache": toy_manifest(("ring", "full"), dtype="int8"),
        "slack": toy_manifest(("ring", "full"), slack=1),
        "context": toy_manifest(("ring", "full"), context=95),
        "model": manifest.model_copy(update={"model": eps}),
        "weights": manifest.model_copy(update={"source": weights}),
        "quantization": manifest.model_copy(update={"programs": (quantized,)}),
    }


@pytest.mark.parametrize("difference", [*others(toy_manifest()), "truncated", "missing", "foreign"])
def test_a_state_of_another_model_or_a_damaged_one_is_refused(tmp_path: Path, difference: str) -> None:
    manifest = toy_manifest(("ring", "full"))
    state = State(manifest)
    mark(state, 20)
    path = tmp_path / "s"
    state.save(path)
    target = State(others(manifest).get(difference, manifest))
    mark(target, 3)
    if difference == "truncated":
        path.write_bytes(path.read_bytes()[:-10])
    elif difference == "missing":
        path.unlink()
    elif difference == "foreign":
        from safetensors.torch import save_file

        save_file({"x": torch.zeros(1)}, path)
    before = [t.clone() for t in target.tensors]
    with pytest.raises(StateFileError, match="state file s"):
        target.load(path)
    assert target.length == 3
    assert all(torch.equal(a, b) for a, b in zip(before, target.tensors, strict=True))


def test_a_file_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this very model, and refused before anything of it is used."""
    state = State(toy_manifest())
    mark(state, 20)
    monkeypatch.setattr("runtime_ref.state_file.STATE_VERSION", "0")
    state.save(tmp_path / "s")
    monkeypatch.undo()
    with pytest.raises(StateFileError, match="got state version 0; expected version 2"):
        state.load(tmp_path / "s")
    assert state.length == 20


def test_disk_full_keeps_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = State(toy_manifest())
    state.save(tmp_path / "s")
    before = (tmp_path / "s").read_bytes()

    def full(_tensors: object, path: Path, _metadata: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("runtime_ref.state_file.save_file", full)
    with pytest.raises(StateFileError, match="No space left"):
        state.save(tmp_path / "s")
    assert [p.name for p in tmp_path.iterdir()] == ["s"]
    assert (tmp_path / "s").read_bytes() == before


def test_memory_by_kind_of_layer() -> None:
    state = State(toy_manifest(("ring", "ring", "full", "conv"), window=8))
    mark(state, 5)
    sliding, whole, conv = state.memory()
    assert (sliding.kind, sliding.layers, sliding.rows) == ("sliding", 2, 8)
    assert (sliding.allocated_bytes, sliding.used_bytes) == (2 * 2 * 8 * ROW, 2 * 2 * 5 * ROW)
    assert (whole.kind, whole.layers, whole.rows) == ("global", 1, 8)
    assert (whole.allocated_bytes, whole.used_bytes) == (2 * 8 * ROW, 2 * 5 * ROW)
    assert (conv.kind, conv.layers, conv.rows, conv.used_bytes) == ("conv", 1, 2, 2 * ROW)
    assert state.memory() == planned_usage(state.manifest, 5)
    assert sum(t.nbytes for t in state.tensors) == sum(kind.allocated_bytes for kind in state.memory())
    mark(state, 40)
    assert state.memory() == planned_usage(state.manifest, 45)
    assert state.memory()[0].used_bytes == state.memory()[0].allocated_bytes == sliding.allocated_bytes
    assert state.report() == (
        "[kv] 45 tokens | sliding 2 x 8 rows 0.00 MiB | global 1 x 64 rows 0.00 MiB | conv 1 x 2 rows 0.00 MiB | "
        "total 0.00 MiB, 0.00 MiB used | grown 2 times"
    )


def test_the_report_adds_up_in_mebibytes() -> None:
    """One ring and one full layer of 8192 rows of 32 bytes: keys and values of each are half a MiB."""
    state = State(toy_manifest(("ring", "full"), window=8192, context=65536))
    state.ensure_rows(8192)
    state.advance([7] * 4096)
    assert state.report() == (
        "[kv] 4096 tokens | sliding 1 x 8192 rows 0.50 MiB | global 1 x 8192 rows 0.50 MiB | "
        "total 1.00 MiB, 0.50 MiB used | grown 1 times"
    )


def test_dropped_and_lost_rows_are_not_in_use() -> None:
    state = State(toy_manifest(("ring",), window=8))
    mark(state, 30)
    state.rewind(1)
    assert state.memory()[0].used_bytes == 2 * 7 * ROW
    alone = State(toy_manifest(("ring",), window=1))
    mark(alone, 10)
    alone.rewind(7)
    assert alone.memory()[0].used_bytes == 0


def test_the_cost_of_a_context_against_full_caches() -> None:
    manifest = toy_manifest(("ring", "full", "conv"), window=8, context=96)
    (cost,) = context_costs(manifest, [20])
    assert cost.allocated_bytes == (2 * 8 + 2 * 32 + 2) * ROW
    assert cost.full_bytes == (2 * 20 + 2 * 20 + 2) * ROW
    assert [cost.tokens for cost in context_costs(manifest)] == [96]
    with pytest.raises(RuntimeLimitError, match="97 tokens"):
        context_costs(manifest, [97])
