"""The values that stored weights stand for, as a float model: what a file with reduced weights is compared with.

Letters: N output channels (rows), K input channels.
"""

from __future__ import annotations

import torch

from exporter.model.decoder import Decoder
from exporter.quantization import grids
from exporter.quantization.palettes import palettize

BLOCK = 32
"""Input channels that share a scale in ``int4``."""
LEAST_SIZE = 1024
"""Smaller matrices stay as they are: what is saved is not worth an operator."""


def round_weights(decoder: Decoder, weights: str) -> None:
    """Replace the matrices of every linear and embedding by what ``int8``, ``int4`` or ``palettized4`` makes of them,
    in place; a tied one stays tied. Weights and arithmetic stay float32."""
    rounded: dict[int, torch.nn.Parameter] = {}
    for module in decoder.modules():
        if not isinstance(module, torch.nn.Linear | torch.nn.Embedding) or module.weight.numel() < LEAST_SIZE:
            continue
        key = id(module.weight)
        if key not in rounded:
            rounded[key] = torch.nn.Parameter(reduced(module.weight.detach(), weights), requires_grad=False)
            rounded[id(rounded[key])] = rounded[key]  # its own is met again where the module is shared
        module.weight = rounded[key]


def reduced(weight: torch.Tensor, weights: str) -> torch.Tensor:
    """float32 ``[N, K]`` to the values that are left of it, float32 ``[N, K]``."""
    rows, columns = weight.shape
    if weights == "palettized4":
        indices, palettes = palettize(weight)
        return palettes.gather(1, indices.long())
    if weights == "int4" and columns % BLOCK == 0:
        integers, scales = grids.int4_per_group(weight, BLOCK)
        return (integers.view(rows, -1, BLOCK) * scales[..., None]).reshape(rows, columns)
    integers, row_scales = grids.int8_per_row(weight)
    return integers * row_scales[:, None]
