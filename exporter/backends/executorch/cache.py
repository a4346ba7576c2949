"""The caches on ExecuTorch's in-place operators: the same interface as `exporter.cache.plain`, held to the same tests.

Letters: B batch (1), Q query_len, C capacity, H heads, K KV heads, D head_dim.

``llama::update_cache`` and ``llama::update_cache_with_indices`` write rows into the caller's tensor with no copy of it;
``llama::custom_sdpa`` reads only rows 0 .. start_pos + Q - 1 when causal. The indices descend from symbolic sizes:
``start`` is the integer ``offset mod C`` itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401  registers llama::*
from executorch.kernels import quantized  # noqa: F401  registers the out variants of quantized_decomposed::*
from torch.ao.quantization.fx import _decomposed  # noqa: F401  registers quantized_decomposed::*

from exporter.cache import masks, plain, storage
from exporter.cache.interface import Extras, Rows, States, check_single_query


class RingKVCache(plain.RingKVCache):
    """`plain.RingKVCache` with in-place row writes."""

    def update(self, chunk: States, offset: int) -> None:
        """Rows are written in order of position, so where a chunk laps the ring the newest token of a slot stays."""
        start = offset % self.capacity
        slots = masks.ring_slots(offset, chunk[0].shape[1], self.capacity).view(1, -1)
        for state, rows in zip(self.states, chunk, strict=True):
            torch.ops.llama.update_cache_with_indices(rows, state, start, slots)

    def update_and_fetch(self, chunk: States, offset: int) -> Rows:
        check_single_query(chunk[0].shape[1])
        slot = offset % self.capacity
        for state, row in zip(self.states, chunk, strict=True):
            torch.ops.llama.update_cache(row, state, slot)
        return self.storage.decode(self.states)


class FullKVCache(plain.FullKVCache):
    """`plain.FullKVCache` with in-place row writes."""

    def update(self, chunk: States, offset: int) -> None:
        for state, rows in zip(self.states, chunk, strict=True):
            torch.ops.llama.update_cache(rows, state, offset)


class Int8Rows(storage.Int8Rows):
    """`storage.Int8Rows`, decoded by one kernel that XNNPACK leaves alone.

    Plain aten's product becomes two steps: a conversion, which copies the whole state (the graph contract refuses it),
    and a product, which the partitioner has been seen to put into one delegate with the encoding of a row, perhaps the
    very row that must be written before this read. The kernel makes a float copy of every row the caller allocated, in
    memory planned for the longest context. ``llama::custom_quantized_sdpa`` needs none, but it wants the queries in
    int8 too (docs/int8-cache.md).
    """

    def dequantize(self, integers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        zeros, largest = torch.zeros_like(scales, dtype=torch.int64), storage.LARGEST
        return torch.ops.quantized_decomposed.dequantize_per_token(
            integers, scales, zeros, -largest, largest, torch.int8, torch.float32
        )


class ExecutorchKernels(plain.PlainKernels):
    """`CacheKernels` on the ``llama::`` operators; softcaps and sinks, which they lack, take the plain attention."""

    name = "executorch"
    int8_rows = Int8Rows()

    def ring(self, states: Sequence[torch.Tensor], window: int) -> RingKVCache:
        return RingKVCache(states, window, self.storage(states))

    def full(self, states: Sequence[torch.Tensor]) -> FullKVCache:
        return FullKVCache(states, self.storage(states))

    def attend_masked(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, extras: Extras
    ) -> torch.Tensor:
        if not extras.plain_softmax:
            return super().attend_masked(query, keys, values, visible, extras)
        mask = masks.additive(visible, query.dtype)
        return torch.ops.llama.custom_sdpa(query, keys, values, 0, mask, 0.0, False, extras.scale)

    def attend_causal(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, offset: int, extras: Extras
    ) -> torch.Tensor:
        if not extras.plain_softmax:
            return super().attend_causal(query, keys, values, offset, extras)
        return torch.ops.llama.custom_sdpa(query, keys, values, offset, None, 0.0, True, extras.scale)
