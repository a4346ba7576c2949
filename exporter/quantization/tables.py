"""The embedding and the head. Tied, they are one table, which is stored once whatever grids its rows have.

Letters: V vocab_size, D hidden_size, g groups a row, R rows in int8, n rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from exporter.grids.base import store
from exporter.grids.int4 import INT4_MAX, INT4_MIN
from exporter.model.decoder import Decoder, ReadParameter, all_read
from exporter.quantization.gptq import Gptq
from exporter.quantization.linears import rounded
from exporter.quantization.modules import (
    QuantizedEmbedding,
    QuantizedLinear,
    ScaledEmbedding,
    SplitEmbedding,
    SplitLinear,
    pack_nibbles,
)
from exporter.spec import EMBEDDING, HEAD, GridSpec, Recipe

RESIDUAL_MAX = 7
ROWS_AT_A_TIME = 8192


def quantize_tables(decoder: Decoder, recipe: Recipe, gptq: Gptq | None = None, read: ReadParameter = all_read) -> None:
    """Replace embedding and head as the recipe says, in place. `gptq` knows the head's input; of an unread decoder the
    embedding is read when the head's floats are gone, unless they are the same."""
    decoder.read_part("lm_head", read)
    head = decoder.lm_head
    assert isinstance(head, torch.nn.Linear)
    parts = _head_parts(head.weight.detach(), recipe, gptq)
    own = recipe[EMBEDDING]
    shared = _embedding_of(parts, head.weight.detach(), own.parts) if own.shared and parts else None
    del head
    if parts:
        decoder.lm_head = parts[0] if len(parts) == 1 else SplitLinear(*parts)
    decoder.read_part("embed_tokens", read)
    scaled = decoder.embed_tokens
    embedding = scaled.table if isinstance(scaled, ScaledEmbedding) else scaled
    assert isinstance(embedding, torch.nn.Embedding)
    table = _own_embedding(embedding, recipe) if shared is None else shared
    decoder.embed_tokens = ScaledEmbedding(table, scaled.factors) if isinstance(scaled, ScaledEmbedding) else table


def _head_parts(weight: torch.Tensor, recipe: Recipe, gptq: Gptq | None) -> list[QuantizedLinear]:
    """The head ``[V, D]``, part by part of its rows; nothing where it stays float."""
    if recipe.is_float(HEAD):
        return []
    parts = recipe[HEAD].parts
    return [QuantizedLinear.of(rounded(_rows(weight, part), part, gptq), None, part) for part in parts]


def _rows(weight: torch.Tensor, part: GridSpec) -> torch.Tensor:
    return weight if part.rows is None else weight[slice(*part.rows)]


def _embedding_of(parts: list[QuantizedLinear], weight: torch.Tensor, residuals: Sequence[GridSpec]) -> torch.nn.Module:
    """The embedding that gathers from the head's own bytes; of rows for which there is a residual, it keeps what these
    leave of the float `weight` too."""
    tables, start = [], 0
    for part in parts:
        rows = slice(start, start + len(part.weight))
        if part.group_size is None:
            tables.append(QuantizedEmbedding(part.weight, part.scales[:, None]))
        else:
            has_residual = any(one.rows in (None, (rows.start, rows.stop)) for one in residuals)
            residual = residual_of(weight[rows], part) if has_residual else None
            packed = in_blocks(lambda codes: (pack_nibbles(codes),), part.weight)[0]
            tables.append(QuantizedEmbedding(packed, part.scales.to(torch.bfloat16), residual))
        start = rows.stop
    return tables[0] if len(tables) == 1 else SplitEmbedding(*tables)


def _own_embedding(embedding: torch.nn.Embedding, recipe: Recipe) -> torch.nn.Module:
    """A table that shares nothing with the head."""
    if recipe.is_float(EMBEDDING):
        return embedding
    kept = recipe.grid(EMBEDDING)
    stored = store(embedding.weight.detach(), kept)
    assert stored.scales is not None and stored.zero_points is None, f"an embedding on the grid {kept.grid}"
    codes = stored.codes if kept.group_size is None else pack_nibbles(stored.codes)
    return QuantizedEmbedding(codes, stored.scales)


def residual_of(weight: torch.Tensor, part: QuantizedLinear) -> QuantizedEmbedding:
    """What int4 rows leave of ``weight [n, D]``, as int4 again, each group on the scale of its largest value.

    GPTQ moves weights by more than half a step, so the scale is not that of the first four bits over 16.
    """
    assert part.group_size is not None
    size = part.group_size

    def block(rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left = rows.reshape(*scales.shape, size) - codes.view(*scales.shape, size) * scales[..., None]
        tiny = torch.finfo(torch.bfloat16).tiny
        own = (left.abs().amax(-1) / RESIDUAL_MAX).to(torch.bfloat16).clamp(min=tiny)
        rounded = (left / own.float()[..., None]).round_().clamp_(INT4_MIN, INT4_MAX)
        return pack_nibbles(rounded.view(rows.shape).to(torch.int8)), own

    packed, own_scales = in_blocks(block, weight, part.weight, part.scales)
    return QuantizedEmbedding(packed, own_scales)


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
