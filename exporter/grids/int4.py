"""int4 with a scale a group, ``w ~ scale * q``.

Letters: N output channels (rows), K input channels, g groups a row, G group_size, n rows of a block.
"""

from __future__ import annotations

import torch

from exporter.grids.base import Grid, Steps, Stored, row_blocks

INT4_MIN, INT4_MAX = -8, 7
LEAST_DIVISOR, MOST_DIVISOR = 5.9, 8.9
"""A group's scale is ``max|w|`` over one of these or a number between them."""
SEARCH_STEPS = 24
GPTQ_SEARCH_STEPS = 16


def int4_per_group(weight: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 ``[N, K]`` to int8 ``[N, K]`` holding -8 .. 7 and float32 scales ``[N, g]``, g = K / group_size.

    Each group takes the scale of least squared error among `SEARCH_STEPS` from ``max|w| / 8.9`` to ``max|w| / 5.9``:
    clipping the largest weight often pays. Scales are rounded to bfloat16, which is how XNNPACK stores them, before
    the error is measured, so that eager and the delegate share one grid.
    """
    quantized = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0], weight.shape[1] // group_size)
    for rows in row_blocks(weight):
        grouped = weight[rows].reshape(-1, weight.shape[1] // group_size, group_size)
        best_q, best_scale = _least_squares_scale(grouped)
        quantized[rows], scales[rows] = best_q.reshape(weight[rows].shape), best_scale
    return quantized, scales


def _least_squares_scale(grouped: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[n, g, G]`` to its int8 codes and scales ``[n, g]``."""
    largest = grouped.abs().amax(-1, keepdim=True)
    tiny = torch.finfo(torch.bfloat16).tiny
    best_error = torch.full(largest.shape, torch.inf)
    best_scale = torch.full(largest.shape, tiny)
    for divisor in torch.linspace(LEAST_DIVISOR, MOST_DIVISOR, SEARCH_STEPS).tolist():
        scale = (largest / divisor).to(torch.bfloat16).float().clamp_(min=tiny)
        codes = (grouped / scale).round_().clamp_(INT4_MIN, INT4_MAX)
        error = codes.mul_(scale).sub_(grouped).square_().sum(-1, keepdim=True)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
    codes = (grouped / best_scale).round_().clamp_(INT4_MIN, INT4_MAX)
    return codes.to(torch.int8), best_scale[..., 0]


def cheapest_scale(group: torch.Tensor, costs: torch.Tensor) -> torch.Tensor:
    """``[G, n]`` and the cost of a squared error in each of its columns ``[G]`` to scales ``[n]``: for every row the
    best of `GPTQ_SEARCH_STEPS`, from ``max|w| / 8.9`` to ``max|w| / 5.9``, as bfloat16 has them."""
    largest = torch.maximum(group.amax(0), -group.amin(0))
    tiny = torch.finfo(torch.bfloat16).tiny
    best_error, best = torch.full_like(largest, torch.inf), torch.full_like(largest, tiny)
    buffer = torch.empty_like(group)
    for divisor in torch.linspace(LEAST_DIVISOR, MOST_DIVISOR, GPTQ_SEARCH_STEPS).tolist():
        scale = (largest / divisor).to(torch.bfloat16).float().clamp_(min=tiny)
        torch.div(group, scale, out=buffer).round_().clamp_(INT4_MIN, INT4_MAX).mul_(scale).sub_(group).square_()
        error = costs @ buffer
        better = error < best_error
        best_error, best = torch.where(better, error, best_error), torch.where(better, scale, best)
    return best


def _store(weight: torch.Tensor, group_size: int | None) -> Stored:
    assert group_size is not None
    return Stored(*int4_per_group(weight, group_size))


GRID = Grid(
    name="int4", codes="int4", store=_store, grouped=True,
    steps=Steps(limits=(INT4_MIN, INT4_MAX), of_group=cheapest_scale),
)  # fmt: skip
