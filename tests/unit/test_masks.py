"""Masks and slots against a replay of the ring: a list of positions, written one by one."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from exporter.cache import masks

RINGS = [(c, w) for c in (8, 16, 32) for w in (c, c // 2, 1)]


def replay(count: int, capacity: int) -> list[int]:
    """The position in each slot after `count` tokens; -1: never written."""
    ring = [-1] * capacity
    for position in range(count):
        ring[position % capacity] = position
    return ring


def chunk_lengths(capacity: int) -> tuple[int, ...]:
    return (1, 2, 5, capacity - 1, capacity, capacity + 1, 2 * capacity + 3)


@pytest.mark.parametrize("capacity", [1, 2, 3, 8, 16, 32])
def test_positions_and_slots_are_those_of_the_replayed_ring(capacity: int) -> None:
    for count in range(3 * capacity + 3):
        positions = masks.ring_positions(count, capacity)
        assert positions.dtype == torch.int64
        assert positions.clamp(min=-1).tolist() == replay(count, capacity)
        for length in chunk_lengths(capacity):
            slots = masks.ring_slots(count, length, capacity)
            assert slots.dtype == torch.int64
            assert slots.tolist() == [p % capacity for p in range(count, count + length)]


@pytest.mark.parametrize(("capacity", "window"), RINGS)
def test_concat_mask_shows_each_query_the_last_window_positions_once(capacity: int, window: int) -> None:
    for offset in range(3 * capacity + 1):
        for length in chunk_lengths(capacity):
            held = replay(offset, capacity) + list(range(offset, offset + length))
            visible = masks.concat_window_causal_mask(offset, length, capacity, window)
            assert visible.dtype == torch.bool and visible.shape == (length, capacity + length)
            for i, row in enumerate(visible.tolist()):
                query = offset + i
                seen = sorted(position for position, shown in zip(held, row, strict=True) if shown)
                assert seen == list(range(max(0, query - window + 1), query + 1)), (offset, length, i)


@pytest.mark.parametrize(("capacity", "window"), RINGS)
def test_chunk_first_mask_leaves_out_what_was_never_written(capacity: int, window: int) -> None:
    for offset in range(3 * capacity + 1):
        for length in chunk_lengths(capacity):
            ring = [position for position in replay(offset, capacity) if position >= 0]
            held = list(range(offset, offset + length)) + ring
            assert masks.held_slots(offset, capacity) == len(ring)
            visible = masks.chunk_first_window_causal_mask(offset, length, capacity, window)
            assert visible.dtype == torch.bool and visible.shape == (length, len(held))
            for i, row in enumerate(visible.tolist()):
                query = offset + i
                seen = sorted(position for position, shown in zip(held, row, strict=True) if shown)
                assert seen == list(range(max(0, query - window + 1), query + 1)), (offset, length, i)


@pytest.mark.parametrize(("capacity", "window"), RINGS)
def test_ring_mask_shows_the_newest_token_its_window(capacity: int, window: int) -> None:
    for seq_len in range(1, 3 * capacity + 2):
        held = replay(seq_len, capacity)
        visible = masks.ring_window_causal_mask(seq_len, capacity, window)
        assert visible.dtype == torch.bool and visible.shape == (1, capacity)
        seen = sorted(position for position, shown in zip(held, visible[0].tolist(), strict=True) if shown)
        assert seen == list(range(max(0, seq_len - window), seq_len))


def test_five_tokens_and_a_window_of_two_give_the_band() -> None:
    visible = masks.concat_window_causal_mask(0, 5, 2, 2)
    assert not visible[:, :2].any()
    assert visible[:, 2:].tolist() == [[0 <= i - j < 2 for j in range(5)] for i in range(5)]


def test_a_window_of_one_shows_a_token_itself_only() -> None:
    for offset in range(4):
        visible = masks.concat_window_causal_mask(offset, 4, 3, 1)
        assert not visible[:, :3].any() and torch.equal(visible[:, 3:], torch.eye(4, dtype=torch.bool))
        assert masks.ring_window_causal_mask(offset + 1, 3, 1)[0].tolist() == [j == offset % 3 for j in range(3)]


@pytest.mark.parametrize(("offset", "length", "rows"), [(0, 1, 1), (0, 1, 4), (0, 5, 9), (3, 2, 5), (6, 4, 16)])
def test_causal_mask(offset: int, length: int, rows: int) -> None:
    expected = [[row <= offset + i for row in range(rows)] for i in range(length)]
    assert masks.causal_mask(offset, length, rows).tolist() == expected


def test_last_live_row_is_a_minimum() -> None:
    for capacity in (*range(1, 70), 511, 512, 513, 4096):
        for offset in (*range(300), *range(505, 520), 4094, 4095, 4096, 4097, 131_071, 2**31):
            assert masks.last_live_row(offset, capacity) == min(offset, capacity - 1), (offset, capacity)


class Counted(int):
    """An int whose quotients and remainders refuse a negative dividend, as its sums and differences do in turn."""

    def __mod__(self, other: int) -> Counted:
        assert self >= 0
        return Counted(int(self) % other)

    def __floordiv__(self, other: int) -> Counted:
        assert self >= 0
        return Counted(int(self) // other)

    def __rfloordiv__(self, other: int) -> Counted:
        assert other >= 0
        return Counted(other // int(self))

    def __add__(self, other: object) -> Counted:
        return Counted(int(self) + other) if isinstance(other, int) else NotImplemented

    def __sub__(self, other: object) -> Counted:
        return Counted(int(self) - other) if isinstance(other, int) else NotImplemented

    __radd__ = __add__


class NoNegativeDividend(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.name()
        assert not any(word in name for word in ("remainder", "fmod")), name
        if "div" in name:
            self.divisions += 1
            assert args[0].min() >= 0, "a negative dividend"
        return func(*args, **(kwargs or {}))

    divisions = 0


@pytest.mark.parametrize("offset", [0, 1, 7, 8, 9, 40])
def test_no_dividend_is_negative_and_no_tensor_remainder_is_taken(offset: int) -> None:
    """Integer remainders of negative numbers differ between runtimes."""
    count = Counted(offset)
    with NoNegativeDividend() as watched:
        masks.ring_positions(count, 8)
        masks.ring_slots(count, 20, 8)
        masks.concat_window_causal_mask(count, 20, 8, 8)
        masks.ring_window_causal_mask(Counted(offset + 1), 8, 8)
        masks.last_live_row(count, 8)
    assert watched.divisions == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_additive_masks_are_finite_and_stay_so_under_the_lowest_score(dtype: torch.dtype) -> None:
    mask = masks.additive(torch.tensor([True, False]), dtype)
    assert mask.dtype == dtype and mask[0] == 0 and mask[1] < -1e4
    assert torch.isfinite(mask + torch.finfo(dtype).min / 2).all()
