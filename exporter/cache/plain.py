"""The meaning of the caches, in plain aten that every back end can lower.

Letters: B batch (1), Q query_len, C capacity, T rows attended to, H heads, K KV heads, G = H / K, D head_dim.
No scatter is used: a ring is rewritten by one gather after attention, a single row by a slice write.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from exporter.cache import masks
from exporter.cache.interface import Extras, States, check_single_query
from exporter.cache.storage import FloatRows, HalfRows, Int8Rows, Storage


class _Cache:
    """One layer's states, rows on axis 1, and how rows are kept in them."""

    def __init__(self, states: Sequence[torch.Tensor], storage: Storage) -> None:
        self.states, self.storage = tuple(states), storage

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> States:
        return self.storage.encode(keys, values)


class RingKVCache(_Cache):
    """The last C rows of a sliding layer; the attention window W is at most C."""

    def __init__(self, states: Sequence[torch.Tensor], window: int, storage: Storage) -> None:
        super().__init__(states, storage)
        assert 1 <= window <= self.capacity, f"window {window} does not fit a ring of {self.capacity} rows"
        self.window = window

    @property
    def capacity(self) -> int:
        return int(self.states[0].shape[1])

    def fetch_and_concat(self, chunk: States, offset: int) -> States:
        held = self.written(self.states, offset)
        return tuple(torch.cat(pair, 1) for pair in zip(held, chunk, strict=True))

    def concat_mask(self, offset: int, query_len: int) -> torch.Tensor:
        return masks.concat_window_causal_mask(offset, query_len, self.capacity, self.window)

    def update(self, chunk: States, offset: int) -> None:
        """Slot j takes the newest token congruent to j: from the chunk if it is there, else what the ring held."""
        query_len = chunk[0].shape[1]
        held = masks.ring_positions(offset + query_len, self.capacity)
        from_chunk = held - offset + self.capacity  # row of the concatenation [ring, chunk]
        source = torch.where(held >= offset, from_chunk, torch.arange(self.capacity))
        for state, rows in zip(self.states, chunk, strict=True):
            state.copy_(torch.cat([state, rows], 1).index_select(1, source))

    def written(self, rows: States, count: int) -> States:
        return zeroed_but(masks.ring_positions(count, self.capacity) >= 0, rows)

    def update_and_fetch(self, chunk: States, offset: int) -> States:
        check_single_query(chunk[0].shape[1])
        slot = offset % self.capacity
        for state, row in zip(self.states, chunk, strict=True):
            state.narrow(1, slot, 1).copy_(row)
        return self.states


class FullKVCache(_Cache):
    """A global layer's rows in order of position, at least offset + Q of them."""

    def update(self, chunk: States, offset: int) -> None:
        for state, rows in zip(self.states, chunk, strict=True):
            state.narrow(1, offset, rows.shape[1]).copy_(rows)

    def update_and_fetch(self, chunk: States, offset: int) -> States:
        self.update(chunk, offset)
        return self.states


def zeroed_but(kept: torch.Tensor, rows: States) -> States:
    """`rows` ``[B, T, K, ...]`` with zeros for those that `kept`, bool ``[T]``, denies.

    A mask gives such a row weight 0, but 0 times what uninitialised memory holds may be NaN. Integers stay as they are:
    their scale is a zero.
    """
    kept = kept.view(1, -1, 1, 1)
    return tuple(torch.where(kept, part, 0.0) if part.is_floating_point() else part for part in rows)


def attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, extras: Extras
) -> torch.Tensor:
    """Softmax attention from its definition, ``[B, Q, H, D]``; each KV head serves G consecutive query heads.

    A sink is one more score per head that takes part in the softmax and has no value (GPT-OSS).
    """
    batch, query_len, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[2]
    group = num_heads // num_kv_heads
    query_BKGQD = query.view(batch, query_len, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    keys_BK1DT = keys.permute(0, 2, 3, 1).unsqueeze(2)
    values_BK1TD = values.permute(0, 2, 1, 3).unsqueeze(2)
    scores = torch.matmul(query_BKGQD * extras.scale, keys_BK1DT)
    if extras.softcap is not None:
        scores = torch.tanh(scores / extras.softcap) * extras.softcap
    scores = scores + masks.additive(visible, scores.dtype)
    if extras.sinks is not None:
        sinks = extras.sinks.view(1, num_kv_heads, group, 1, 1).expand(batch, -1, -1, query_len, 1)
        weights = torch.softmax(torch.cat([scores, sinks], -1), -1).narrow(-1, 0, keys.shape[1])
    else:
        weights = torch.softmax(scores, -1)
    attended_BKGQD = torch.matmul(weights, values_BK1TD)
    return attended_BKGQD.permute(0, 3, 1, 2, 4).reshape(batch, query_len, num_heads, head_dim)


class PlainKernels:
    """`CacheKernels` in plain aten."""

    name = "plain"
    int8_rows: Storage = Int8Rows()
    half_rows: Storage = HalfRows()

    def storage(self, states: Sequence[torch.Tensor]) -> Storage:
        """The plan gave the states their dtypes (`spec.state_specs`); they say how rows are kept."""
        dtypes: dict[torch.dtype, Storage] = {torch.int8: self.int8_rows, torch.float16: self.half_rows}
        return dtypes.get(states[0].dtype, FloatRows())

    def ring(self, states: Sequence[torch.Tensor], window: int) -> RingKVCache:
        return RingKVCache(states, window, self.storage(states))

    def full(self, states: Sequence[torch.Tensor]) -> FullKVCache:
        return FullKVCache(states, self.storage(states))

    def attend_masked(self, query: torch.Tensor, rows: States, visible: torch.Tensor, extras: Extras) -> torch.Tensor:
        """The module's `attention` over rows as this implementation's storage decodes them."""
        storage = self.storage(rows)
        if extras.plain_softmax:
            query = storage.round_query(query)
        return attention(query, *storage.decode(rows), visible, extras)

    def attend_causal(self, query: torch.Tensor, rows: States, offset: int, extras: Extras) -> torch.Tensor:
        """Every allocated row takes part under a mask: a slice of ``offset + Q`` rows could not be traced for all
        lengths, because torch.export tells a length of 1 from all others."""
        total, query_len = rows[0].shape[1], query.shape[1]
        live = zeroed_but(torch.arange(total) < offset + query_len, rows)
        return self.attend_masked(query, live, masks.causal_mask(offset, query_len, total), extras)
