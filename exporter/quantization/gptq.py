"""Rounding that lets the columns still to be rounded make up for those that are (GPTQ, Frantar et al. 2023).

torchao's and AutoGPTQ's forms want a CUDA device, and round to grids with a zero point of their own.

Letters: N output channels (rows), K input channels (columns), g groups a row, G group_size, n rows and B columns of a
block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from exporter.quantization.grids import INT4_MAX, INT4_MIN, INT8_MAX, int8_scales, row_blocks

DAMP = 0.1
"""Share of the mean second moment that is added to all of them: what was not seen is not to be trusted."""
SEARCH_STEPS = 16
ROWS_AT_A_TIME = 2048  # a group of them, transposed, stays in the cache
INT8_COLUMNS = 64


@dataclass(frozen=True)
class Gptq:
    """Rounds the weights that meet one input; rows are rounded independently of each other.

    Attributes:
        moments: float32 ``[K, K]``, the mean of ``x x^T`` over inputs.
        group_size: of int4; K is a multiple of it.
    """

    moments: torch.Tensor
    group_size: int
    _orders: dict[int, _Order] = field(default_factory=dict, init=False, repr=False)

    @torch.no_grad()
    def int8(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 ``[N, K]`` to the grid of `grids.int8_per_row`: int8 ``[N, K]`` and float32 scales ``[N]``, which are
        those of the nearest codes."""
        order = self._order(1)
        codes = torch.empty(weight.shape, dtype=torch.int8)
        scales = int8_scales(weight)
        for rows in row_blocks(weight, ROWS_AT_A_TIME):
            left = order.columns_of(weight[rows])
            limits = (-INT8_MAX, INT8_MAX)
            found, _ = _round_rows(left, order.upper, INT8_COLUMNS, limits, _given(scales[rows]))
            codes[rows] = order.rows_of(found)
        return codes, scales

    @torch.no_grad()
    def int4(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 ``[N, K]`` to the grid of `grids.int4_per_group`: int8 ``[N, K]`` in -8 .. 7 and bfloat16 values as
        float32 scales ``[N, g]``, each the cheapest of its group when its turn comes."""
        order = self._order(self.group_size)
        codes = torch.empty(weight.shape, dtype=torch.int8)
        scales = torch.empty(weight.shape[0], weight.shape[1] // self.group_size)
        for rows in row_blocks(weight, ROWS_AT_A_TIME):
            left = order.columns_of(weight[rows])
            limits = (INT4_MIN, INT4_MAX)
            found, found_scales = _round_rows(left, order.upper, self.group_size, limits, _cheapest_scale)
            codes[rows], scales[rows] = order.rows_of(found), found_scales[order.groups.argsort()].T
        return codes, scales

    def _order(self, group_size: int) -> _Order:
        """For all linears at this input, worked out once."""
        if group_size not in self._orders:
            self._orders[group_size] = _Order.of(self.moments, group_size)
        return self._orders[group_size]


@dataclass(frozen=True)
class _Order:
    """In which order columns are rounded, and what their errors do to later ones.

    Attributes:
        groups: int64 ``[g]``.
        columns: int64 ``[K]``, a group's together.
        upper: float32 ``[K, K]``, `_error_factors` in this order.
    """

    groups: torch.Tensor
    columns: torch.Tensor
    upper: torch.Tensor

    @classmethod
    def of(cls, moments: torch.Tensor, group_size: int) -> _Order:
        """The largest inputs first, for what is rounded last has nothing left to make up for it."""
        seconds = moments.diagonal().view(-1, group_size)
        groups = seconds.sum(1).argsort(descending=True, stable=True)
        within = seconds[groups].argsort(descending=True, stable=True)
        columns = (groups[:, None] * group_size + within).flatten()
        return cls(groups, columns, _error_factors(moments[columns][:, columns]))

    def columns_of(self, rows: torch.Tensor) -> torch.Tensor:
        """``[n, K]`` to ``[K, n]`` in this order."""
        return rows.T.contiguous()[self.columns]  # gathered from the transposed view it takes three times as long

    def rows_of(self, columns: torch.Tensor) -> torch.Tensor:
        """Back again."""
        return columns[self.columns.argsort()].T


def _error_factors(moments: torch.Tensor) -> torch.Tensor:
    """Upper triangular U, float32 ``[K, K]``, with ``U^T U`` the inverse of the damped moments, which are changed.

    Rounding column j by ``d`` costs ``(d / U_jj)^2``, if the columns k behind it move by ``-d U_jk / U_jj``. With
    ``moments = R R^T`` and R upper triangular, which is a Cholesky factor from the other end, U is the inverse of R.
    """
    diagonal = moments.diagonal()
    diagonal += DAMP * diagonal.mean().clamp(min=torch.finfo(torch.float32).tiny)
    factor = torch.linalg.cholesky(moments.flip(0, 1)).flip(0, 1)
    return torch.linalg.solve_triangular(factor, torch.eye(len(factor)), upper=True)


Scale = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Columns ``[B, n]`` that are due, and the cost of a squared error in each of them ``[B]``, to the scale of each row
``[n]``."""


def _round_rows(
    left: torch.Tensor, upper: torch.Tensor, block: int, limits: tuple[int, int], scale_of: Scale
) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns as rows, ``[K, n]``, so that what is worked on is contiguous, to codes ``[K, n]`` and the scales of each
    `block` of them, ``[K / B, n]``. `left` is what columns still to be rounded have become."""
    codes = torch.empty(left.shape, dtype=torch.int8)
    scales = []
    errors = torch.empty(block, left.shape[1])
    for start in range(0, len(left), block):
        end = min(start + block, len(left))
        within = upper[start:end, start:end]
        scale = scale_of(left[start:end], within.diagonal() ** -2)
        for j in range(end - start):
            column = torch.addmv(left[start + j], errors[:j].T, within[:j, j], alpha=-1)
            code = (column / scale).round_().clamp_(*limits)
            codes[start + j] = code
            torch.sub(column, code.mul_(scale), out=errors[j]).div_(within[j, j])
        left[end:].addmm_(upper[start:end, end:].T, errors[: end - start], alpha=-1)
        scales.append(scale)
    return codes, torch.stack(scales)


def _given(scales: torch.Tensor) -> Scale:
    return lambda due, costs: scales


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
