"""What the weights of a decoder take, in bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from exporter.model.decoder import Decoder, parameter_shapes
from exporter.quantization.modules import QuantizedEmbedding, QuantizedLinear

FLOAT, INT8_SCALE, GROUP_SCALE = 32, 32, 16


@dataclass(frozen=True)
class WeightBits:
    """Averages over the weights, scales included: `stored` over all of them, each byte of the file once; `read` over
    those that every token goes through, which are all but the embedding of a model whose head is not tied to it."""

    stored: float
    read: float


def weight_bits(decoder: Decoder) -> WeightBits:
    """Of a decoder, quantised or not."""
    spec = decoder.spec
    everything = sum(torch.Size(shape).numel() for shape in parameter_shapes(spec).values())
    table = spec.vocab_size * spec.hidden_size
    weights_read = everything if spec.tie_word_embeddings else everything - table

    linears = [m for m in decoder.modules() if isinstance(m, QuantizedLinear)]
    rows = [m for m in decoder.embed_tokens.modules() if isinstance(m, QuantizedEmbedding)]
    residuals = [m.residual for m in rows if m.residual is not None]
    head = [m for m in decoder.lm_head.modules() if isinstance(m, QuantizedLinear)]

    quantized = sum(m.weight.numel() for m in linears)
    bits_read = sum(map(_linear_bits, linears)) + FLOAT * (weights_read - quantized)
    if not spec.tie_word_embeddings:
        beside = sum(map(_table_bits, rows)) if rows else FLOAT * table
    elif rows and head:
        beside = sum(map(_table_bits, residuals))
    else:  # a table of its own beside the head's, unless both are the float one
        beside = sum(map(_table_bits, rows)) if rows else FLOAT * table * bool(head)
    return WeightBits((bits_read + beside) / everything, bits_read / weights_read)


def _linear_bits(linear: QuantizedLinear) -> int:
    codes, scales = linear.weight.numel(), linear.scales.numel()
    return 8 * codes + INT8_SCALE * scales if linear.group_size is None else 4 * codes + GROUP_SCALE * scales


def _table_bits(table: QuantizedEmbedding) -> int:
    return sum(8 * tensor.element_size() * tensor.numel() for tensor in (table.weight, table.scales))
