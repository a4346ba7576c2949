"""int8 with a scale a row, ``w ~ scale * q``.

Letters: N output channels (rows), K input channels.
"""

from __future__ import annotations

import torch

from exporter.grids.base import Grid, Steps, Stored, row_blocks

INT8_MAX = 127


def int8_per_row(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 ``[N, K]`` to int8 ``[N, K]`` in -127 .. 127 and float32 scales ``[N]``: ``scale = max|w| / 127``."""
    scales = int8_scales(weight)
    quantized = torch.empty(weight.shape, dtype=torch.int8)
    for rows in row_blocks(weight):
        quantized[rows] = (weight[rows] / scales[rows, None]).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
    return quantized, scales


def int8_scales(weight: torch.Tensor) -> torch.Tensor:
    """float32 ``[N]``, ``max|w| / 127`` of every row."""
    largest = torch.cat([weight[rows].abs().amax(1) for rows in row_blocks(weight)])
    return (largest / INT8_MAX).clamp(min=torch.finfo(torch.float32).tiny)


def _store(weight: torch.Tensor, group_size: int | None) -> Stored:
    codes, scales = int8_per_row(weight)
    return Stored(codes, scales[:, None])


GRID = Grid(name="int8", codes="int8", store=_store, steps=Steps(limits=(-INT8_MAX, INT8_MAX), of_rows=int8_scales))
