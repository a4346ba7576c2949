"""Rounding to 4 bits that lets the columns still to be rounded make up for those that are (GPTQ, Frantar et al. 2023).

torchao's and AutoGPTQ's forms want a CUDA device, and round to grids with a zero point of their own.

Letters: N output channels (rows), K input channels (columns), g groups a row, G group_size, n rows of a block.
"""

from __future__ import annotations

import torch

from exporter.quantization.grids import INT4_MAX, INT4_MIN, row_blocks

DAMP = 0.1
"""Share of the mean second moment that is added to all of them: what was not seen is not to be trusted."""
SEARCH_STEPS = 16
ROWS_AT_A_TIME = 2048  # a group of them, transposed, stays in the cache


@torch.no_grad()
def int4_by_gptq(weight: torch.Tensor, moments: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 ``[N, K]`` to the grid of `grids.int4_per_group`: int8 ``[N, K]`` in -8 .. 7 and bfloat16 values as
    float32 scales ``[N, g]``.

    Args:
        weight: the rows; they are rounded independently of each other.
        moments: float32 ``[K, K]``, the mean of ``x x^T`` over inputs.
        group_size: K is a multiple of it.
    """
    groups, columns = _order(moments, group_size)
    upper = _error_factors(moments[columns][:, columns])
    codes = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0], weight.shape[1] // group_size)
    for rows in row_blocks(weight, ROWS_AT_A_TIME):
        left = weight[rows].T.contiguous()[columns]  # gathered from the transposed view it takes three times as long
        found, found_scales = _round_rows(left, upper, group_size)
        codes[rows], scales[rows] = found[columns.argsort()].T, found_scales[groups.argsort()].T
    return codes, scales


def _order(moments: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The groups ``[g]`` and their columns ``[K]`` in the order in which they are rounded: the largest inputs first,
    for what is rounded last has nothing left to make up for it."""
    seconds = moments.diagonal().view(-1, group_size)
    groups = seconds.sum(1).argsort(descending=True, stable=True)
    within = seconds[groups].argsort(descending=True, stable=True)
    return groups, (groups[:, None] * group_size + within).flatten()


def _error_factors(moments: torch.Tensor) -> torch.Tensor:
    """Upper triangular U, float32 ``[K, K]``, with ``U^T U`` the inverse of the damped moments.

    Rounding column j by ``d`` costs ``(d / U_jj)^2``, if the columns k behind it move by ``-d U_jk / U_jj``.
    """
    damped = moments.double()
    diagonal = damped.diagonal()
    diagonal += DAMP * diagonal.mean().clamp(min=torch.finfo(torch.float32).tiny)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True).float()


def _round_rows(left: torch.Tensor, upper: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns as rows, ``[K, n]``, so that what is worked on is contiguous, to codes ``[K, n]`` and scales ``[g, n]``.
    `left` is what columns still to be rounded have become."""
    codes = torch.empty(left.shape, dtype=torch.int8)
    scales = torch.empty(left.shape[0] // group_size, left.shape[1])
    errors = torch.empty(group_size, left.shape[1])
    for group in range(len(scales)):
        start, end = group * group_size, (group + 1) * group_size
        within = upper[start:end, start:end]
        scale = _cheapest_scale(left[start:end], within.diagonal() ** -2)
        for j in range(group_size):
            column = torch.addmv(left[start + j], errors[:j].T, within[:j, j], alpha=-1)
            code = (column / scale).round_().clamp_(INT4_MIN, INT4_MAX)
            codes[start + j] = code
            torch.sub(column, code.mul_(scale), out=errors[j]).div_(within[j, j])
        left[end:].addmm_(upper[start:end, end:].T, errors, alpha=-1)
        scales[group] = scale
    return codes, scales


def _cheapest_scale(group: torch.Tensor, costs: torch.Tensor) -> torch.Tensor:
    """``[G, n]`` and the cost of a squared error in each of its columns ``[G]`` to scales ``[n]``: for every row the
    best of `SEARCH_STEPS`, from ``max|w| / 8.9`` to ``max|w| / 5.9``, as bfloat16 has them."""
    largest = torch.maximum(group.amax(0), -group.amin(0))
    tiny = torch.finfo(torch.bfloat16).tiny
    best_error, best = torch.full_like(largest, torch.inf), torch.full_like(largest, tiny)
    buffer = torch.empty_like(group)
    for divisor in torch.linspace(5.9, 8.9, SEARCH_STEPS).tolist():
        scale = (largest / divisor).to(torch.bfloat16).float().clamp_(min=tiny)
        torch.div(group, scale, out=buffer).round_().clamp_(INT4_MIN, INT4_MAX).mul_(scale).sub_(group).square_()
        error = costs @ buffer
        better = error < best_error
        best_error, best = torch.where(better, error, best_error), torch.where(better, scale, best)
    return best
