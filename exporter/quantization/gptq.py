"""Rounding that lets the columns still to be rounded make up for those that are (GPTQ, Frantar et al. 2023).

torchao's and AutoGPTQ's forms want a CUDA device, and round to grids with a zero point of their own.

Letters: N output channels (rows), K input channels (columns), k those of a stretch, g groups a row, G group_size, n
rows and B columns of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from exporter.grids import grid
from exporter.grids.base import Stored, row_blocks
from exporter.spec import GridSpec

DAMP = 0.1
"""Share of the mean second moment that is added to all of them: what was not seen is not to be trusted."""
ROWS_AT_A_TIME = 2048  # a group of them, transposed, stays in the cache
COLUMNS_TOGETHER = 2048  # the widest input of the models that were measured
COLUMNS_OF_ROWS = 64  # with a scale a row: their errors reach the columns behind them as one product of matrices


def stretches(channels: int, group_size: int) -> list[int]:
    """Sizes of the stretches into which K channels are cut, at most `COLUMNS_TOGETHER` or a group, multiples of
    `group_size` if K is one, as few and as equal as can be.

    A column makes up for those of its own stretch only: what GPTQ takes then grows with K as the weights do, and not
    with its square (moments) and cube (their factors). The models measured in docs/quantization.md have one stretch.
    """
    group_size = group_size if channels % group_size == 0 else 1  # then no linear here is int4
    groups = channels // group_size
    count = -(-groups // max(COLUMNS_TOGETHER // group_size, 1))
    return [groups * (n + 1) // count * group_size - groups * n // count * group_size for n in range(count)]


@dataclass(frozen=True)
class Gptq:
    """Rounds the weights that meet one input; rows are rounded independently of each other.

    Attributes:
        moments: of each stretch of its channels, one after the other, float32 ``[k, k]``, the mean of ``x x^T``; every
            k is a whole number of the groups that weights are rounded in.
    """

    moments: Sequence[torch.Tensor]
    _orders: dict[int, list[_Order]] = field(default_factory=dict, init=False, repr=False)

    @torch.no_grad()
    def store(self, weight: torch.Tensor, kept: GridSpec) -> Stored:
        """float32 ``[N, K]`` in the form `kept`, whose grid has steps: codes int8 ``[N, K]``, and float32 scales: those
        of rows ``[N, 1]`` as for the nearest codes, those of groups ``[N, g]`` chosen when a group's turn comes."""
        steps = grid(kept.grid).steps
        assert steps is not None, f"GPTQ does not round to {kept.grid}"
        codes = torch.empty(weight.shape, dtype=torch.int8)
        if kept.group_size is None:
            assert steps.of_rows is not None
            row_scales = steps.of_rows(weight)
            for rows, columns, order in self._blocks(weight, 1):
                left = order.columns_of(weight[rows, columns])
                found, _ = _round_rows(left, order.upper, COLUMNS_OF_ROWS, steps.limits, _given(row_scales[rows]))
                codes[rows, columns] = order.rows_of(found)
            return Stored(codes, row_scales[:, None])
        assert steps.of_group is not None
        scales = torch.empty(weight.shape[0], weight.shape[1] // kept.group_size)
        for rows, columns, order in self._blocks(weight, kept.group_size):
            groups = slice(columns.start // kept.group_size, columns.stop // kept.group_size)
            left = order.columns_of(weight[rows, columns])
            found, own = _round_rows(left, order.upper, kept.group_size, steps.limits, steps.of_group)
            codes[rows, columns], scales[rows, groups] = order.rows_of(found), own[order.groups.argsort()].T
        return Stored(codes, scales)

    def _blocks(self, weight: torch.Tensor, group_size: int) -> Iterator[tuple[slice, slice, _Order]]:
        """Rows, the columns of a stretch, and their order, which is worked out once for all linears at this input."""
        if group_size not in self._orders:
            self._orders[group_size] = [_Order.of(moments, group_size) for moments in self.moments]
        start = 0
        for order in self._orders[group_size]:
            columns = slice(start, start + len(order.columns))
            for rows in row_blocks(weight, ROWS_AT_A_TIME):
                yield rows, columns, order
            start = columns.stop
        assert start == weight.shape[1], "moments of other channels"


@dataclass(frozen=True)
class _Order:
    """In which order columns are rounded, and what their errors do to later ones.

    Attributes:
        groups: int64 ``[g]``.
        columns: int64 ``[k]``, a group's together.
        upper: float32 ``[k, k]``, `_error_factors` in this order.
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
        """``[n, k]`` to ``[k, n]`` in this order."""
        return rows.T.contiguous()[self.columns]  # gathered from the transposed view it takes three times as long

    def rows_of(self, columns: torch.Tensor) -> torch.Tensor:
        """Back again."""
        return columns[self.columns.argsort()].T


def _error_factors(moments: torch.Tensor) -> torch.Tensor:
    """Upper triangular U, float32 ``[k, k]``, with ``U^T U`` the inverse of the damped moments, which are changed.

    Rounding column j by ``d`` costs ``(d / U_jj)^2``, if the columns l behind it move by ``-d U_jl / U_jj``. With
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
    """Columns as rows, ``[k, n]``, so that what is worked on is contiguous, to codes ``[k, n]`` and the scales of each
    `block` of them, ``[k / B, n]``. `left` is what columns still to be rounded have become."""
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
