"""The embedding and the head. Tied, they are one table, which is stored once whatever grids its rows have.

Letters: V vocab_size, D hidden_size, g groups a row, R rows in int8, n rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from exporter.model.decoder import Decoder, ReadParameter, all_read
from exporter.quantization import grids
from exporter.quantization.calibration import HEAD
from exporter.quantization.linears import Rounding, check_group
from exporter.quantization.modules import (
    QuantizedEmbedding,
    QuantizedLinear,
    ScaledEmbedding,
    SplitEmbedding,
    SplitLinear,
    pack_nibbles,
)
from exporter.spec import QuantizationSpec

RESIDUAL_MAX = 7
ROWS_AT_A_TIME = 8192


def quantize_tables(
    decoder: Decoder, spec: QuantizationSpec, rounding: Rounding, read: ReadParameter = all_read
) -> None:
    """Replace embedding and head as `spec` says, in place. `rounding` is the head's and of what a tied embedding shares
    with it; of an unread decoder the embedding is read when the head's floats are gone, unless they are the same."""
    decoder.read_part(HEAD, read)
    head = decoder.lm_head
    assert isinstance(head, torch.nn.Linear)
    parts = _head_parts(head.weight.detach(), spec, rounding)
    shared = None
    if decoder.spec.tie_word_embeddings and parts and spec.embedding != "none":
        with_residual = spec.embedding == "int8"
        shared = _embedding_of(parts, head.weight.detach() if with_residual else None)
    del head
    if parts:
        decoder.lm_head = parts[0] if len(parts) == 1 else SplitLinear(*parts)
    decoder.read_part("embed_tokens", read)
    scaled = decoder.embed_tokens
    embedding = scaled.table if isinstance(scaled, ScaledEmbedding) else scaled
    assert isinstance(embedding, torch.nn.Embedding)
    table = _own_embedding(embedding, spec) if shared is None else shared
    decoder.embed_tokens = ScaledEmbedding(table, scaled.factors) if isinstance(scaled, ScaledEmbedding) else table


def check_tables(decoder: Decoder, spec: QuantizationSpec) -> None:
    """Raises ConfigError: `group_size` does not divide a row of an int4 table."""
    for name, grid in (("embedding", spec.embedding), ("lm_head", spec.head)):
        if grid == "int4":
            check_group(decoder.spec.hidden_size, name, spec.group_size)


def _head_parts(weight: torch.Tensor, spec: QuantizationSpec, rounding: Rounding) -> list[QuantizedLinear]:
    """The head ``[V, D]`` as int8 rows, int4 rows, or the one after the other; nothing where it stays float."""
    if spec.head == "none":
        return []
    rows = len(weight) if spec.head == "int8" else min(spec.head_int8_rows, len(weight))
    parts = []
    if rows:
        parts.append(QuantizedLinear(*rounding.int8(weight[:rows]), None, None))
    if rows < len(weight):
        parts.append(QuantizedLinear(*rounding.int4(weight[rows:]), None, spec.group_size))
    return parts


def _embedding_of(parts: list[QuantizedLinear], weight: torch.Tensor | None) -> torch.nn.Module:
    """The embedding that gathers from the head's own bytes; with the float `weight`, what 4 bits leave over is kept in
    4 more."""
    tables, start = [], 0
    for part in parts:
        count = len(part.weight)
        if part.group_size is None:
            tables.append(QuantizedEmbedding(part.weight, part.scales[:, None]))
        else:
            residual = None if weight is None else residual_of(weight[start : start + count], part)
            packed = in_blocks(lambda codes: (pack_nibbles(codes),), part.weight)[0]
            tables.append(QuantizedEmbedding(packed, part.scales.to(torch.bfloat16), residual))
        start += count
    return tables[0] if len(tables) == 1 else SplitEmbedding(*tables)


def _own_embedding(embedding: torch.nn.Embedding, spec: QuantizationSpec) -> torch.nn.Module:
    weight = embedding.weight.detach()
    if spec.embedding == "none":
        return embedding
    if spec.embedding == "int8":
        codes, scales = grids.int8_per_row(weight)
        return QuantizedEmbedding(codes, scales[:, None])
    codes, scales = grids.int4_per_group(weight, spec.group_size)
    return QuantizedEmbedding(pack_nibbles(codes), scales)


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
        rounded = (left / own.float()[..., None]).round_().clamp_(grids.INT4_MIN, grids.INT4_MAX)
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
