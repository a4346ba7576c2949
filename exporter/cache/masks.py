"""Which keys a query may see, from shapes alone.

Letters: Q query_len, C capacity of the ring, W window, S seq_len after the call, `offset` = S - Q.

Every function takes Python ints or symbolic ints and returns a tensor whose values descend from those ints only. No
tensor remainder is taken and no dividend is negative: ExecuTorch's integer remainder has C's sign, torch's has
Python's.
"""

from __future__ import annotations

import torch


def ring_positions(count: int, capacity: int) -> torch.Tensor:
    """The position that each slot of a ring holds after `count` tokens, int64 ``[C]``; negative: never written.

    Position p lives in slot ``p mod C``, so slot j holds the newest position congruent to j:
    ``newest - ((newest - j) mod C)`` with ``newest = count - 1``. The age is taken from ``count mod C``, the slot the
    *next* token will use, which keeps the dividend non-negative at count 0.
    """
    behind = (count % capacity - 1) - torch.arange(capacity)  # -C <= behind < C - 1 - j
    age = torch.where(behind >= 0, behind, behind + capacity)
    return (count - 1) - age


def ring_slots(offset: int, query_len: int, capacity: int) -> torch.Tensor:
    """The slot of each token of a chunk, ``(offset + i) mod C``, int64 ``[Q]``; a chunk may lap the ring."""
    steps = torch.arange(query_len) + offset % capacity
    return steps - capacity * torch.div(steps, capacity, rounding_mode="floor")


def window_visible(query_pos: torch.Tensor, key_pos: torch.Tensor, window: int) -> torch.Tensor:
    """bool ``[Q, T]``: key positions in ``(query - W, query]`` that were ever written (``>= 0``)."""
    age = query_pos[:, None] - key_pos[None, :]
    return torch.logical_and(torch.logical_and(age >= 0, age < window), key_pos[None, :] >= 0)


def concat_window_causal_mask(offset: int, query_len: int, capacity: int, window: int) -> torch.Tensor:
    """bool ``[Q, C + Q]``, True where visible: the ring as it stood *before* the chunk, then the chunk itself."""
    query_pos = torch.arange(query_len) + offset
    key_pos = torch.cat([ring_positions(offset, capacity), query_pos])
    return window_visible(query_pos, key_pos, window)


def chunk_first_window_causal_mask(offset: int, query_len: int, capacity: int, window: int) -> torch.Tensor:
    """bool ``[Q, Q + min(offset, C)]``, True where visible: the chunk, then those slots of the ring that held a token
    *before* the chunk. They are the first ones: a ring fills up in order."""
    query_pos = torch.arange(query_len) + offset
    key_pos = torch.cat([query_pos, ring_positions(offset, capacity)])
    return window_visible(query_pos, key_pos.narrow(0, 0, query_len + held_slots(offset, capacity)), window)


def held_slots(offset: int, capacity: int) -> int:
    """``min(offset, C)``: how many slots of a ring hold a token after `offset` tokens.

    A symbolic minimum, whose bound C is what memory is planned by. A length of its own it must not become, because
    torch.export tells lengths of 0 and 1 from all others; it is a summand of one.
    """
    return torch.sym_min(offset, capacity)


def ring_window_causal_mask(seq_len: int, capacity: int, window: int) -> torch.Tensor:
    """bool ``[1, C]``, True where visible: the ring *after* the newest token (position S - 1) was written."""
    newest = torch.arange(1) + (seq_len - 1)
    return window_visible(newest, ring_positions(seq_len, capacity), window)


def causal_mask(offset: int, query_len: int, rows: int) -> torch.Tensor:
    """bool ``[Q, rows]``, True where visible: rows 0 .. offset + i of a cache in order of position."""
    return torch.arange(rows)[None, :] <= (torch.arange(query_len) + offset)[:, None]


def last_live_row(offset: int, capacity: int) -> int:
    """``min(offset, C - 1)``: the last row of a ring in use after the token at `offset` was written.

    Written in integer arithmetic on non-negative numbers, which every converter takes:
    ``C // (offset + 1)`` is 0 exactly when ``offset >= C``, and ``1 // (1 + x)`` is 1 exactly when x is 0.
    """
    wrapped = 1 // (1 + capacity // (offset + 1))
    return offset - (offset - (capacity - 1)) * wrapped


def additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where visible, half the dtype's lowest value elsewhere: finite, and adding a score cannot overflow it."""
    return torch.where(visible, 0.0, torch.finfo(dtype).min / 2).to(dtype)
