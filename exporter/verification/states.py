"""The states two runs end with, row by row.

Letters: L layers that share a tensor, R rows in use, H heads (1 of a convolution), D numbers of a head's row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from exporter.spec import StateSpec
from runtime_ref.state import State

_LARGEST = torch.finfo(torch.float32).max  # JSON has no infinity


class StateErrors(NamedTuple):
    """How far the rows of all states are from those of a reference.

    The error of a row is the mean difference of one head's D numbers over the root mean square of that head's rows in
    the reference: 0 for equal ones, about 1 for one that was never written or is another token's.

    `difference` is the largest of single numbers, `row` the largest error of a row and `place` where that is, `mean`
    the largest that the rows of one head have on average.
    """

    difference: float
    row: float
    mean: float
    place: str


def state_errors(state: State, reference: State) -> StateErrors:
    """Compare every row that holds a token, integers taken for what they stand for. What is no number is infinitely
    far."""
    theirs = dict(float_states(reference))
    difference, row, mean, place = 0.0, 0.0, 0.0, ""
    for spec, ours in float_states(state):
        other = theirs[spec]
        rows = min(state.length, ours.shape[1], other.shape[1]) if spec.kind != "conv" else ours.shape[1]
        got, want = (_by_head(one[:, :rows]) for one in (ours, other))
        apart = (got - want).abs().nan_to_num(nan=torch.inf)
        scale = want.square().mean((1, 3)).sqrt().clamp(min=torch.finfo(torch.float32).tiny)
        errors = apart.mean(3) / scale[:, None]
        difference, mean = max(difference, float(apart.max())), max(mean, float(errors.mean(1).max()))
        if not float(errors.max()) <= row:
            layer, where, _ = torch.unravel_index(errors.argmax(), errors.shape)
            row, place = float(errors.max()), f"{spec.name}, layer {spec.layers[int(layer)]}, row {int(where)}"
    return StateErrors(min(difference, _LARGEST), min(row, _LARGEST), min(mean, _LARGEST), place)


def _by_head(rows: torch.Tensor) -> torch.Tensor:
    """``[L, R, ...]`` to float32 ``[L, R, H, D]``."""
    return (rows if rows.dim() == 4 else rows[:, :, None]).float()


def float_states(state: State) -> Iterator[tuple[StateSpec, torch.Tensor]]:
    """Every state but the scales, as floats: described as it would be in a float32 cache, and its rows."""
    tensors = {spec.name: tensor for spec, tensor in zip(state.manifest.states, state.tensors, strict=True)}
    for spec in state.manifest.with_float_caches().states:
        own = next(one for one in state.manifest.states if one.name == spec.name)
        rows = tensors[spec.name]
        yield spec, rows if own.scales is None else rows * tensors[own.scales]
