"""The embedding and the head. Tied and on one grid, they are one table, which is stored once.

Letters: V vocab_size, D hidden_size, g groups a row, n rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from exporter.grids.base import store
from exporter.model.decoder import Decoder, ReadParameter, all_read
from exporter.quantization.gptq import Gptq
from exporter.quantization.linears import rounded
from exporter.quantization.modules import (
    ExactHead,
    QuantizedEmbedding,
    QuantizedLinear,
    ScaledEmbedding,
    pack_nibbles,
)
from exporter.spec import EMBEDDING, HEAD, GridSpec, Recipe

ROWS_AT_A_TIME = 8192


def quantize_tables(decoder: Decoder, recipe: Recipe, gptq: Gptq | None = None, read: ReadParameter = all_read) -> None:
    """Replace embedding and head as the recipe says, in place. `gptq` knows the head's input; of an unread decoder the
    embedding is read when the head's floats are gone, unless they are the same."""
    decoder.read_part("lm_head", read)
    head, scaled, own = decoder.lm_head, decoder.embed_tokens, recipe[EMBEDDING]
    assert isinstance(head, torch.nn.Linear)
    weight = head.weight.detach()
    factors = scaled.factors if isinstance(scaled, ScaledEmbedding) else None  # what undoes the head's smoothing
    rough = None if recipe.is_float(HEAD) else _head(weight, recipe.part(HEAD), gptq)
    table = None
    if own.shared and rough is not None:
        table = _same_bytes(rough)
        decoder.embed_tokens = table if factors is None else ScaledEmbedding(table, factors)
    elif own.tied_to is not None and not recipe.is_float(EMBEDDING):
        table = decoder.embed_tokens = table_of(weight, recipe.part(EMBEDDING), factors)
    if rough is not None:
        decoder.lm_head = _with_exact_rows(rough, weight, recipe, table, factors)
    if own.tied_to is None:
        del head, weight
        decoder.read_part("embed_tokens", read)
        embedding = decoder.embed_tokens
        assert isinstance(embedding, torch.nn.Embedding)
        if not recipe.is_float(EMBEDDING):
            decoder.embed_tokens = table_of(embedding.weight.detach(), recipe.part(EMBEDDING))


def _head(weight: torch.Tensor, part: GridSpec, gptq: Gptq | None) -> QuantizedLinear:
    return QuantizedLinear.of(rounded(weight, part, gptq), None, part)


def _with_exact_rows(
    rough: QuantizedLinear, weight: torch.Tensor, recipe: Recipe, table: QuantizedEmbedding | None,
    factors: torch.Tensor | None,
) -> torch.nn.Module:  # fmt: skip
    """The head, with the embedding's `table` for its exact rows where the recipe says so: that has the rows of a tied
    model before smoothing, other rows are those of `weight` as it is."""
    exact = recipe[HEAD].exact
    if exact is None:
        return rough
    if exact.of is None:
        return ExactHead(rough, table_of(weight, exact.part), exact.count, None)
    assert table is not None
    return ExactHead(rough, table, exact.count, None if factors is None else 1 / factors)


def table_of(weight: torch.Tensor, part: GridSpec, factors: torch.Tensor | None = None) -> QuantizedEmbedding:
    """A table of float32 ``[V, D]``, channel by channel times `factors` ``[D]``, that shares nothing."""

    def block(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        stored = store(rows if factors is None else rows * factors, part)
        assert stored.scales is not None and stored.zero_points is None, f"an embedding on the grid {part.grid}"
        assert part.scales is not None
        codes = pack_nibbles(stored.codes) if part.codes == "int4" else stored.codes
        return codes, stored.scales.to(getattr(torch, part.scales))

    return QuantizedEmbedding(*in_blocks(block, weight))


def _same_bytes(head: QuantizedLinear) -> QuantizedEmbedding:
    """The embedding that gathers from the head's own bytes: of int4 rows, those that XNNPACK packs."""
    if head.group_size is None:
        return QuantizedEmbedding(head.weight, head.scales[:, None])
    packed = in_blocks(lambda codes: (pack_nibbles(codes),), head.weight)[0]
    return QuantizedEmbedding(packed, head.scales.to(torch.bfloat16))


def in_blocks(function: Callable[..., tuple[torch.Tensor, ...]], *tables: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`function` over `ROWS_AT_A_TIME` rows of `tables` at a time, which all have as many rows as it returns."""
    wholes: tuple[torch.Tensor, ...] = ()
    for start in range(0, len(tables[0]), ROWS_AT_A_TIME):
        rows = slice(start, start + ROWS_AT_A_TIME)
        results = function(*(table[rows] for table in tables))
        wholes = wholes or tuple(result.new_empty(len(tables[0]), *result.shape[1:]) for result in results)
        for whole, result in zip(wholes, results, strict=True):
            whole[rows] = result
    return wholes
