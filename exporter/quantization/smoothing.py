"""Share outliers between the inputs of linears and their weights (SmoothQuant, Xiao et al. 2023).

Channel k of an input is divided by a factor, column k of the weights it meets multiplied by it, and whatever made the
input absorbs the division: a norm's weight, rows of a linear, the head's own table. Factors are powers of two, so every
product of the float model stays what it was, bit for bit.

Letters: N output channels, K input channels, H heads, G = heads that share a KV head, C = head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from exporter.model.attention import Attention
from exporter.model.decoder import Decoder, DecoderLayer
from exporter.model.mlp import MLP
from exporter.model.norms import RMSNorm
from exporter.quantization.calibration import Inputs
from exporter.quantization.modules import ScaledEmbedding

ALPHA = 0.5
"""How much of the inputs' spread moves into the weights; measured in docs/quantization.md."""


@torch.no_grad()
def fold_layer(layer: DecoderLayer, inputs: Mapping[str, Inputs]) -> None:
    """Smooth the inputs of a layer's linears, in place: the layer computes what it did, and `inputs` follow.

    A mixture of experts stays as it is: its router and experts are not quantised.
    """
    mixer, feed_forward = layer.mixer, layer.feed_forward
    if isinstance(mixer, Attention):
        _fold_norm(layer.input_norm, (mixer.q_proj, mixer.k_proj, mixer.v_proj), inputs["mixer.q_proj"])
        _fold_values(mixer, inputs["mixer.o_proj"])
    else:
        size = mixer.out_proj.in_features
        _fold_norm(layer.input_norm, (mixer.in_proj,), inputs["mixer.in_proj"])
        gate = slice(size, 2 * size)  # the gate on the way out: its product with the convolution is the input
        _fold_rows(mixer.in_proj, gate, mixer.out_proj, inputs["mixer.out_proj"])
    if isinstance(feed_forward, MLP):
        gate_proj, up, down = feed_forward.gate_proj, feed_forward.up_proj, feed_forward.down_proj
        _fold_norm(layer.feed_forward_norm, (gate_proj, up), inputs["feed_forward.gate_proj"])
        _fold_rows(up, slice(None), down, inputs["feed_forward.down_proj"])


@torch.no_grad()
def fold_head(decoder: Decoder, inputs: Inputs) -> None:
    """Smooth the head's input, in place. A tied embedding gathers from the same table and divides afterwards."""
    head = decoder.lm_head
    assert isinstance(head, torch.nn.Linear)
    factors = _factors(inputs.fourth, _energy(head.weight))
    decoder.norm.weight.div_(factors)
    head.weight.mul_(factors)
    inputs.divide(factors)
    if decoder.spec.tie_word_embeddings:
        decoder.embed_tokens = ScaledEmbedding(decoder.embed_tokens, 1 / factors)


def _fold_norm(norm: RMSNorm, linears: Sequence[torch.nn.Linear], inputs: Inputs) -> None:
    factors = _factors(inputs.fourth, torch.stack([_energy(linear.weight) for linear in linears]).sum(0))
    norm.weight.div_(factors)
    for linear in linears:
        linear.weight.mul_(factors)
    inputs.divide(factors)


def _fold_rows(source: torch.nn.Linear, rows: slice, linear: torch.nn.Linear, inputs: Inputs) -> None:
    """`rows` of `source` are a factor of the input of `linear`, channel by channel."""
    _divide_rows(source, rows, factors := _factors(inputs.fourth, _energy(linear.weight)))
    linear.weight.mul_(factors)
    inputs.divide(factors)


def _fold_values(mixer: Attention, inputs: Inputs) -> None:
    """Channel c of a head's output is a mean of channel c of its KV head's values: one factor for its G heads."""
    kv_heads, head_dim = mixer.spec.num_key_value_heads, mixer.spec.head_dim
    grouped = (kv_heads, -1, head_dim)
    fourth = inputs.fourth.view(grouped).sum(1)
    energy = _energy(mixer.o_proj.weight).view(grouped).sum(1)
    factors = _factors(fourth.view(-1), energy.view(-1))
    _divide_rows(mixer.v_proj, slice(None), factors)
    heads = mixer.spec.num_attention_heads // kv_heads
    repeated = factors.view(kv_heads, 1, head_dim).expand(-1, heads, -1).reshape(-1)
    mixer.o_proj.weight.mul_(repeated)
    inputs.divide(repeated)


def _divide_rows(linear: torch.nn.Linear, rows: slice, factors: torch.Tensor) -> None:
    linear.weight[rows].div_(factors[:, None])
    if linear.bias is not None:
        linear.bias[rows].div_(factors)


def _energy(weight: torch.Tensor) -> torch.Tensor:
    """``[N, K]`` to the sum of squares of every column, without a copy of the table."""
    return torch.linalg.vector_norm(weight, dim=0).square_()


def _factors(fourth: torch.Tensor, energy: torch.Tensor) -> torch.Tensor:
    """``fourth^(ALPHA / 4) / energy^((1 - ALPHA) / 2)``, all of ``[K]``, divided by their geometric mean, as powers of
    two; 1 where a channel or all that meets it is zero.

    A token's int8 step follows its largest channels, and costs each channel the squares of its weights. Were the step a
    token's root mean square, second moments with ALPHA a half would be best; fourth ones mind large channels more, and
    one token of thousands does not decide as it does with ``max|x|``.
    """
    live = (fourth > 0) & (energy > 0)
    exponents = torch.where(live, ALPHA / 4 * fourth.log2() - (1 - ALPHA) / 2 * energy.log2(), 0.0)
    exponents = torch.where(live, exponents - exponents.sum() / live.sum().clamp(min=1), 0.0)
    return exponents.round().exp2()
