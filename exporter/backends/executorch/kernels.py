"""The caches on ExecuTorch's in-place operators: the same interface as `exporter.cache.plain`, held to the same tests.

Letters: B batch (1), Q query_len, T rows attended to, C capacity, H heads, K KV heads, G = H / K, N = Q G, D head_dim.

``llama::update_cache`` and ``llama::update_cache_with_indices`` write rows into the caller's tensor with no copy of it;
``llama::custom_sdpa`` reads only rows 0 .. start_pos + Q - 1 when causal. The indices descend from symbolic sizes:
``start`` is the integer ``offset mod C`` itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from executorch.exir.passes import _quant_patterns_and_replacements  # noqa: F401  defines mixed_linear
from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401  registers llama::*
from executorch.kernels import quantized  # noqa: F401  registers the out variants of quantized_decomposed::*
from torch.ao.quantization.fx import _decomposed  # noqa: F401  registers quantized_decomposed::*

from exporter.cache import masks, plain, storage
from exporter.cache.interface import Extras, States, check_single_query
from exporter.quantization.modules import ExactHead, rows_times


class RingKVCache(plain.RingKVCache):
    """`plain.RingKVCache` with in-place row writes."""

    def fetch_and_concat(self, chunk: States, offset: int) -> States:
        """The chunk, then only those slots that hold a token: a prompt's first chunk attends to itself alone."""
        rows = chunk[0].shape[1] + masks.held_slots(offset, self.capacity)
        return tuple(torch.cat(pair, 1).narrow(1, 0, rows) for pair in zip(chunk, self.states, strict=True))

    def concat_mask(self, offset: int, query_len: int) -> torch.Tensor:
        return masks.chunk_first_window_causal_mask(offset, query_len, self.capacity, self.window)

    def update(self, chunk: States, offset: int) -> None:
        """Rows are written in order of position: if a chunk is longer than the ring, slots keep the newest tokens."""
        start = offset % self.capacity
        slots = masks.ring_slots(offset, chunk[0].shape[1], self.capacity).view(1, -1)
        for state, rows in zip(self.states, chunk, strict=True):
            torch.ops.llama.update_cache_with_indices(rows, state, start, slots)

    def update_and_fetch(self, chunk: States, offset: int) -> States:
        check_single_query(chunk[0].shape[1])
        slot = offset % self.capacity
        for state, row in zip(self.states, chunk, strict=True):
            torch.ops.llama.update_cache(row, state, slot)
        return self.states


class FullKVCache(plain.FullKVCache):
    """`plain.FullKVCache` with in-place row writes."""

    def update(self, chunk: States, offset: int) -> None:
        for state, rows in zip(self.states, chunk, strict=True):
            torch.ops.llama.update_cache(rows, state, offset)


class Int8Rows(storage.Int8Rows):
    """`storage.Int8Rows`, decoded by one kernel that XNNPACK does not take; for attention other than
    ``llama::custom_quantized_sdpa``.

    As plain aten, decoding becomes a conversion, which copies the whole state (the graph contract refuses it), and a
    product, which the partitioner may put into one delegate with the encoding of a row, perhaps the row that must be
    written before this read. The kernel makes a float copy of every row it is given, in memory planned for the longest
    context.
    """

    def dequantize(self, integers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        zeros, largest = torch.zeros_like(scales, dtype=torch.int64), storage.LARGEST
        return torch.ops.quantized_decomposed.dequantize_per_token(
            integers, scales, zeros, -largest, largest, torch.int8, torch.float32
        )


def sdpa(
    query: torch.Tensor, rows: States, scale: float, *, start: int = 0, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Plain softmax attention ``[1, Q, H, D]`` float32 over rows as they are kept, under an additive mask ``[Q, T]`` or
    causal from row `start` on.

    float16 rows are read with float16 queries, int8 ones with int8 queries: a conversion of rows would copy all that
    the caller allocated.
    """
    options = (start, mask, 0.0, mask is None, scale)
    if rows[0].dtype != torch.int8:
        keys, values = rows
        return torch.ops.llama.custom_sdpa(query.to(keys.dtype), keys, values, *options).to(query.dtype)
    keys, key_scales, values, value_scales = rows
    query, query_scales = storage.quantize_rows(query)
    query_zeros, row_zeros = (torch.zeros_like(one, dtype=torch.int8) for one in (query_scales, key_scales))
    return torch.ops.llama.custom_quantized_sdpa(
        query, keys, values, *options, query_zeros, query_scales, row_zeros, key_scales, row_zeros, value_scales
    )


def batched_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """`plain.attention` of one sequence as two batched products that XNNPACK takes whole, ``[1, Q, H, D]``.

    A KV head's queries stand one below the other, ``[K, Q*G, D]``, with the mask ``[Q, T]`` repeated for each of the G.
    Every view has at most one dynamic length.
    """
    num_heads, head_dim = query.shape[2:]
    num_kv_heads = keys.shape[2]
    group = num_heads // num_kv_heads
    mask_NT = mask.unsqueeze(1).expand(-1, group, -1).reshape(-1, mask.shape[1])
    query = query * scale
    if num_kv_heads == 1:
        query_KND, keys_KDT = query.view(1, -1, head_dim), keys.view(1, -1, head_dim).permute(0, 2, 1)
        values_KTD = values.view(1, -1, head_dim)
    else:
        query_KND = query.view(-1, num_kv_heads, group * head_dim).permute(1, 0, 2).reshape(num_kv_heads, -1, head_dim)
        keys_KDT = keys.view(-1, num_kv_heads, head_dim).permute(1, 2, 0)
        values_KTD = values.view(-1, num_kv_heads, head_dim).permute(1, 0, 2)
    weights_KNT = torch.softmax(torch.bmm(query_KND, keys_KDT) + mask_NT, -1)
    attended = torch.bmm(weights_KNT, values_KTD)
    if num_kv_heads > 1:
        attended = attended.view(num_kv_heads, -1, group * head_dim).permute(1, 0, 2)
    return attended.reshape(1, -1, num_heads, head_dim)


class ExecutorchKernels(plain.PlainKernels):
    """`CacheKernels` on the ``llama::`` operators; softcaps and sinks, which they lack, take the plain attention.

    The layout for the kernels of `native/`, which skip masked rows.
    """

    name = "executorch"
    int8_rows = Int8Rows()

    def ring(self, states: Sequence[torch.Tensor], window: int) -> RingKVCache:
        return RingKVCache(states, window, self.storage(states))

    def full(self, states: Sequence[torch.Tensor]) -> FullKVCache:
        return FullKVCache(states, self.storage(states))

    def attend_masked(self, query: torch.Tensor, rows: States, visible: torch.Tensor, extras: Extras) -> torch.Tensor:
        if not extras.plain_softmax:
            return super().attend_masked(query, rows, visible, extras)
        return sdpa(query, rows, extras.scale, mask=masks.additive(visible, query.dtype))

    def attend_causal(self, query: torch.Tensor, rows: States, offset: int, extras: Extras) -> torch.Tensor:
        if not extras.plain_softmax:
            return super().attend_causal(query, rows, offset, extras)
        return sdpa(query, rows, extras.scale, start=offset)


class StockKernels(ExecutorchKernels):
    """The layout for ExecuTorch's own operators. ``llama::custom_sdpa`` computes masked rows too; for a chunk, XNNPACK
    takes two thirds of its time. ``llama::custom_quantized_sdpa`` multiplies one element at a time except on ARM:
    decoding int8 rows first takes half the time for a token and a twentieth for a chunk."""

    def attend_masked(self, query: torch.Tensor, rows: States, visible: torch.Tensor, extras: Extras) -> torch.Tensor:
        if not extras.plain_softmax:
            return super().attend_masked(query, rows, visible, extras)
        # One query: a delegate that attends and encodes int8 rows would depend on itself through the decoding kernel.
        if query.shape[1] == 1:
            return super().attend_masked(*self.decoded(query, rows), visible, extras)
        kept, mask = self.storage(rows), masks.additive(visible, query.dtype)
        return batched_attention(kept.round_query(query), *kept.decode(rows), mask, extras.scale)

    def attend_causal(self, query: torch.Tensor, rows: States, offset: int, extras: Extras) -> torch.Tensor:
        if extras.plain_softmax:
            query, rows = self.decoded(query, rows)
        return super().attend_causal(query, rows, offset, extras)

    def decoded(self, query: torch.Tensor, rows: States) -> tuple[torch.Tensor, States]:
        """int8 rows as floats, with the query that attends to them; others as they are."""
        if rows[0].dtype != torch.int8:
            return query, rows
        return self.int8_rows.round_query(query), self.int8_rows.decode(rows)


_MIXED_LINEAR = torch.library.Library("quantized_decomposed", "IMPL")
"""ExecuTorch declares the operator and has a kernel for it, but nothing that eager or a trace could call."""
_MIXED_LINEAR.impl(
    "mixed_linear",
    lambda x, codes, scales, zeros, dtype=None: rows_times(x, codes, scales),
    "CompositeExplicitAutograd",
)
torch.library.register_fake(
    "quantized_decomposed::mixed_linear", lambda x, codes, *_: x.new_empty(x.shape[0], codes.shape[0])
)


def mixed_linear(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """`rows_times` as one operator, of which `native/` has a fast kernel."""
    return torch.ops.quantized_decomposed.mixed_linear(x, codes, scales, None)


def use_mixed_linear(decoder: torch.nn.Module) -> None:
    """Let exact heads multiply by `mixed_linear`."""
    for module in decoder.modules():
        if isinstance(module, ExactHead):
            module.rows_times = mixed_linear
