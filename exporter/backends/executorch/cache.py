"""The caches on ExecuTorch's in-place operators: the same interface as `exporter.cache.plain`, held to the same tests.

Letters: B batch (1), Q query_len, C capacity, H heads, K KV heads, D head_dim.

``llama::update_cache`` and ``llama::update_cache_with_indices`` write rows into the caller's tensor with no copy of it;
``llama::custom_sdpa`` reads only rows 0 .. start_pos + Q - 1 when causal. The indices descend from symbolic sizes:
``start`` is the integer ``offset mod C`` itself.
"""

from __future__ import annotations

import torch
from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401  registers llama::*

from exporter.cache import masks, plain
from exporter.cache.interface import Extras, Rows, check_single_query


class RingKVCache(plain.RingKVCache):
    """`plain.RingKVCache` with in-place row writes."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, offset: int) -> None:
        """Rows are written in order of position, so where a chunk laps the ring the newest token of a slot stays."""
        start = offset % self.capacity
        slots = masks.ring_slots(offset, keys.shape[1], self.capacity).view(1, -1)
        torch.ops.llama.update_cache_with_indices(keys, self.keys, start, slots)
        torch.ops.llama.update_cache_with_indices(values, self.values, start, slots)

    def update_and_fetch(self, keys: torch.Tensor, values: torch.Tensor, offset: int) -> Rows:
        check_single_query(keys.shape[1])
        slot = offset % self.capacity
        torch.ops.llama.update_cache(keys, self.keys, slot)
        torch.ops.llama.update_cache(values, self.values, slot)
        return self.keys, self.values


class FullKVCache(plain.FullKVCache):
    """`plain.FullKVCache` with in-place row writes."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, offset: int) -> None:
        torch.ops.llama.update_cache(keys, self.keys, offset)
        torch.ops.llama.update_cache(values, self.values, offset)


class ExecutorchKernels(plain.PlainKernels):
    """`CacheKernels` on the ``llama::`` operators; softcaps and sinks, which they lack, take the plain attention."""

    name = "executorch"

    def ring(self, keys: torch.Tensor, values: torch.Tensor, window: int) -> RingKVCache:
        return RingKVCache(keys, values, window)

    def full(self, keys: torch.Tensor, values: torch.Tensor) -> FullKVCache:
        return FullKVCache(keys, values)

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
