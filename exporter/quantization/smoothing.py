"""Share outliers between the inputs of linears and their weights (SmoothQuant, Xiao et al. 2023).

Channel k of an input is divided by a factor, column k of the weights it meets multiplied by it, and whatever made the
input absorbs the division: a norm's weight, rows of a linear, the head's own table. Factors are powers of two, so every
product of the float model stays what it was, bit for bit.

Letters: N output channels, K input channels, H heads, G = heads that share a KV head, C = head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from exporter.model.decoder import Decoder, DecoderLayer
from exporter.model.norms import RMSNorm
from exporter.model.parts import Site
from exporter.quantization.calibration import Inputs
from exporter.quantization.linears import linear_at
from exporter.quantization.modules import ScaledEmbedding

ALPHA = 0.5
"""How much of the inputs' spread moves into the weights; measured in docs/quantization.md."""


@torch.no_grad()
def fold_layer(layer: DecoderLayer, inputs: Mapping[str, Inputs]) -> None:
    """Smooth the inputs of a layer's linears, in place: the layer computes what it did, and `inputs` follow."""
    for name, part, norm in layer.parts():
        for site in part.sites:
            own = inputs[f"{name}.{site.linears[0]}"]
            linears = [linear_at(part, linear) for linear in site.linears]
            if site.source is None:
                _fold_norm(norm, linears, own)
            else:
                _fold_rows(linear_at(part, site.source), site, linears, own)


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
    factors = _factors(inputs.fourth, _energy_of_all(linears))
    norm.weight.div_(factors)
    _multiply(linears, factors, inputs)


def _fold_rows(source: torch.nn.Linear, site: Site, linears: Sequence[torch.nn.Linear], inputs: Inputs) -> None:
    """Rows of `source` are a factor of the input, channel by channel; where several heads share a head of rows, one
    factor serves them all."""
    heads = (site.groups, -1, len(source.weight[site.rows]) // site.groups)
    fourth, energy = (channels.view(heads).sum(1) for channels in (inputs.fourth, _energy_of_all(linears)))
    factors = _factors(fourth.view(-1), energy.view(-1))
    _divide_rows(source, site.rows, factors)
    shared = len(inputs.fourth) // len(factors)
    _multiply(linears, factors.view(site.groups, 1, -1).expand(-1, shared, -1).reshape(-1), inputs)


def _multiply(linears: Sequence[torch.nn.Linear], factors: torch.Tensor, inputs: Inputs) -> None:
    """The columns of linears whose input is now divided by `factors`."""
    for linear in linears:
        linear.weight.mul_(factors)
    inputs.divide(factors)


def _divide_rows(linear: torch.nn.Linear, rows: slice, factors: torch.Tensor) -> None:
    linear.weight[rows].div_(factors[:, None])
    if linear.bias is not None:
        linear.bias[rows].div_(factors)


def _energy(weight: torch.Tensor) -> torch.Tensor:
    """``[N, K]`` to the sum of squares of every column, without a copy of the table."""
    return torch.linalg.vector_norm(weight, dim=0).square_()


def _energy_of_all(linears: Sequence[torch.nn.Linear]) -> torch.Tensor:
    return torch.stack([_energy(linear.weight) for linear in linears]).sum(0)


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
