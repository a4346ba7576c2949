"""int8 with a scale a group, ``w ~ scale * q``: what GGUF calls Q8_0.

Letters: N output channels (rows), K input channels, g groups a row, G group_size.
"""

from __future__ import annotations

import torch

from exporter.grids.base import Grid, Stored, row_blocks
from exporter.grids.int8 import INT8_MAX


def int8_per_group(weight: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 ``[N, K]`` to int8 ``[N, K]`` in -127 .. 127 and float32 scales ``[N, g]``: ``max|w| / 127`` of each
    group, as float16 has it. Weights that were Q8_0 come back as they were."""
    groups = weight.shape[1] // group_size
    quantized = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0], groups)
    least = 2.0**-24  # the smallest float16
    for rows in row_blocks(weight):
        grouped = weight[rows].reshape(-1, groups, group_size)
        own = (grouped.abs().amax(-1) / INT8_MAX).half().float().clamp(min=least)
        codes = (grouped / own[..., None]).round_().clamp_(-INT8_MAX, INT8_MAX)
        quantized[rows], scales[rows] = codes.view(weight[rows].shape).to(torch.int8), own
    return quantized, scales


def _store(weight: torch.Tensor, group_size: int | None) -> Stored:
    assert group_size is not None
    return Stored(*int8_per_group(weight, group_size))


GRID = Grid(name="int8_grouped", codes="int8", store=_store, grouped=True)
