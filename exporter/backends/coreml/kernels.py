"""Caches and attention as Core ML takes them: float16 rows in states of fixed shape.

Letters: Q query_len, S seq_len, T rows attended to, H heads, K KV heads, G = H / K, D head_dim; the batch is 1.

Global layers read their S live rows by a slice whose end is a shape, so a step costs what the conversation holds, not
`max_context_length`. Rings are read whole under a mask: their shape stays fixed. Core ML fills a new state with zeros
and every row written since is finite, so masked rows need not be zeroed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from exporter.cache import masks
from exporter.cache.interface import Extras, States
from exporter.cache.plain import FullKVCache, PlainKernels, RingKVCache
from exporter.cache.storage import HalfRows


class CoremlRing(RingKVCache):
    """A ring whose unwritten rows are zero."""

    def written(self, rows: States, count: int) -> States:
        return rows


class CoremlFull(FullKVCache):
    """A global layer's cache that returns only the live rows."""

    def update_and_fetch(self, chunk: States, offset: int) -> States:
        self.update(chunk, offset)
        live = offset + chunk[0].shape[1]
        return tuple(state[:, :live] for state in self.states)


class CoremlKernels(PlainKernels):
    """`CacheKernels` for a decoder whose linear algebra runs in `dtype` and whose softmax runs in `softmax_dtype`."""

    name = "coreml"

    def __init__(self, dtype: torch.dtype = torch.float16, softmax_dtype: torch.dtype = torch.float16) -> None:
        self.dtype, self.softmax_dtype = dtype, softmax_dtype
        self.half_rows = HalfRows(dtype)

    def ring(self, states: Sequence[torch.Tensor], window: int) -> CoremlRing:
        return CoremlRing(states, window, self.half_rows)

    def full(self, states: Sequence[torch.Tensor]) -> CoremlFull:
        return CoremlFull(states, self.half_rows)

    def attend_masked(self, query: torch.Tensor, rows: States, visible: torch.Tensor, extras: Extras) -> torch.Tensor:
        """Matrix products of rank 3, the G query heads of a KV head stacked on the axis of queries."""
        keys, values = self.half_rows.decode(rows)
        query_len, num_heads, head_dim = query.shape[1:]
        num_kv_heads = keys.shape[2]
        group = num_heads // num_kv_heads
        query = query.view(query_len, num_kv_heads, group, head_dim).permute(1, 2, 0, 3) * extras.scale
        query_KGqD = query.reshape(num_kv_heads, group * query_len, head_dim).to(self.dtype)
        scores = torch.matmul(query_KGqD, keys[0].permute(1, 2, 0))
        scores = scores.view(num_kv_heads, group, query_len, -1).to(self.softmax_dtype)
        if extras.softcap is not None:
            scores = torch.tanh(scores / extras.softcap) * extras.softcap
        scores = scores + hiding(visible, scores.dtype)
        if extras.sinks is not None:
            sinks = extras.sinks.view(num_kv_heads, group, 1, 1).expand(-1, -1, query_len, 1).to(scores.dtype)
            weights = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
        else:
            weights = torch.softmax(scores, -1)
        weights = weights.to(self.dtype).view(num_kv_heads, group * query_len, -1)
        attended = torch.matmul(weights, values[0].permute(1, 0, 2)).view(num_kv_heads, group, query_len, head_dim)
        return attended.permute(2, 0, 1, 3).reshape(1, query_len, num_heads, head_dim)

    def attend_causal(self, query: torch.Tensor, rows: States, offset: int, extras: Extras) -> torch.Tensor:
        """`rows` are a global layer's live ones, or a full ring with the last row in use as `offset`."""
        visible = masks.causal_mask(offset, query.shape[1], rows[0].shape[1])
        return self.attend_masked(query, rows, visible, extras)


def hiding(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`masks.additive` as a product: MIL types a select between two scalars as a scalar, even under a tensor."""
    return (visible.to(dtype) - 1.0) * -(torch.finfo(dtype).min / 2)
