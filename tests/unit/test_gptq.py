"""GPTQ against a column-by-column computation from its definition, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_models import one_thread  # noqa: F401

from exporter.grids import grid
from exporter.grids.int4 import GPTQ_SEARCH_STEPS, int4_per_group
from exporter.grids.int8 import int8_per_row
from exporter.quantization import gptq
from exporter.quantization.gptq import DAMP, Gptq


def correlated(tokens: int, channels: int, seed: int = 0) -> torch.Tensor:
    """Inputs ``[T, K]`` whose channels depend on each other and differ in size."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(channels, channels, generator=generator) / channels**0.5
    sizes = torch.exp(torch.randn(channels, generator=generator))
    return torch.randn(tokens, channels, generator=generator) @ (mixing + torch.eye(channels)) * sizes


def weight_of(rows: int, columns: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def int8(moments: Sequence[torch.Tensor], weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales ``[N]`` by GPTQ."""
    stored = Gptq(moments).store(weight, grid("int8").spec(group_size=32, scales="float32", gptq=True))
    assert stored.scales is not None and stored.zero_points is None
    return stored.codes, stored.scales[:, 0]


def int4(
    moments: Sequence[torch.Tensor], weight: torch.Tensor, group_size: int = 32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales ``[N, g]`` by GPTQ."""
    stored = Gptq(moments).store(weight, grid("int4").spec(group_size=group_size, scales="bfloat16", gptq=True))
    assert stored.scales is not None and stored.zero_points is None
    return stored.codes, stored.scales


def by_definition(weight: np.ndarray, moments: np.ndarray, group_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Optimal Brain Quantizer: round a column, let all later ones move by the minimum of the damped quadratic error,
    strike the column from the inverse; a group's scale is chosen when its first column is due. Groups come in the order
    of their inputs' second moments, the largest first, and so do the columns of a group."""
    seconds = np.diag(moments)
    sums = [seconds[g : g + group_size].sum() for g in range(0, len(seconds), group_size)]
    groups = sorted(range(len(sums)), key=lambda g: -sums[g])
    order = [
        g * group_size + k
        for g in groups
        for k in sorted(range(group_size), key=lambda k: -seconds[g * group_size + k])
    ]
    codes, scales = in_this_order(weight[:, order], moments[np.ix_(order, order)], group_size)
    return codes[:, np.argsort(order)], scales[:, np.argsort(groups)]


def int8_by_definition(
    weight: np.ndarray, moments: np.ndarray, scales: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The same with a scale a row, that of its largest weight before any column moves."""
    order = sorted(range(len(moments)), key=lambda k: -moments[k, k])
    scales = np.abs(weight).max(1) / np.float32(127) if scales is None else scales
    codes, _ = in_this_order(weight[:, order], moments[np.ix_(order, order)], 1, scales)
    return codes[:, np.argsort(order)], scales


def in_this_order(
    weight: np.ndarray, moments: np.ndarray, group_size: int, fixed: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Columns from the first to the last, to int8 on the `fixed` scales ``[N]`` or to int4 on the cheapest ones."""
    low, high = (-8, 7) if fixed is None else (-127, 127)
    weight = weight.astype(np.float64)
    moments = moments.astype(np.float64)
    inverse = np.linalg.inv(moments + DAMP * np.mean(np.diag(moments)) * np.eye(len(moments)))
    codes = np.zeros(weight.shape, np.int8)
    scales = np.zeros((len(weight), weight.shape[1] // group_size), np.float32)
    for column in range(weight.shape[1]):
        if column % group_size == 0:
            width = slice(column, column + group_size)
            costs = conditional_costs(inverse, column, group_size)
            for row in range(len(weight)):
                own = cheapest(weight[row, width], costs) if fixed is None else fixed[row]
                scales[row, column // group_size] = own
        scale = scales[:, column // group_size].astype(np.float64)
        codes[:, column] = np.clip(np.round(weight[:, column] / scale), low, high)
        error = (weight[:, column] - codes[:, column] * scale) / inverse[column, column]
        weight -= np.outer(error, inverse[column])
        inverse = inverse - np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return codes, scales


def conditional_costs(inverse: np.ndarray, start: int, count: int) -> np.ndarray:
    """What a squared error in each of the next columns costs, those before it rounded and those behind it free."""
    costs, inverse = [], inverse.copy()
    for column in range(start, start + count):
        costs.append(1 / inverse[column, column])
        inverse -= np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return np.array(costs)


def cheapest(group: np.ndarray, costs: np.ndarray) -> np.float32:
    largest = np.float32(np.abs(group).max())
    best: tuple[float, np.float32] = (np.inf, np.float32(0))
    for divisor in np.linspace(5.9, 8.9, GPTQ_SEARCH_STEPS):
        scale = np.float32(torch.tensor(largest / np.float32(divisor)).bfloat16().float().item())
        codes = np.clip(np.round(group / np.float64(scale)), -8, 7)
        best = min(best, (float(costs @ (codes * scale - group) ** 2), scale))
    return best[1]


@pytest.mark.parametrize("group_size", [32, 64])
def test_codes_and_scales_are_those_of_the_definition(group_size: int) -> None:
    inputs, weight = correlated(300, 128), weight_of(7, 128)
    moments = inputs.T @ inputs / len(inputs)
    codes, scales = int4([moments], weight, group_size)
    want, want_scales = by_definition(weight.numpy(), moments.numpy(), group_size)
    assert codes.dtype == torch.int8 and scales.dtype == torch.float32
    assert np.array_equal(scales.numpy(), want_scales)
    assert np.array_equal(codes.numpy(), want)
    assert torch.equal(scales, scales.bfloat16().float()), "XNNPACK stores scales in bfloat16"


@pytest.mark.parametrize("channels", [64, 96, 130])  # columns are rounded 64 at a time
def test_int8_codes_are_those_of_the_definition(channels: int) -> None:
    inputs, weight = correlated(300, channels), weight_of(7, channels)
    moments = inputs.T @ inputs / len(inputs)
    codes, scales = int8([moments], weight)
    want, want_scales = int8_by_definition(weight.numpy(), moments.numpy())
    assert codes.dtype == torch.int8 and scales.dtype == torch.float32
    assert np.array_equal(scales.numpy(), want_scales)
    assert np.array_equal(codes.numpy(), want)


def test_a_stretch_of_columns_makes_up_for_its_own_errors_only() -> None:
    inputs, weight = correlated(300, 160), weight_of(7, 160)
    sizes = (96, 64)
    parts, weights = inputs.split(sizes, 1), weight.split(sizes, 1)
    moments = [part.T @ part / len(part) for part in parts]
    codes, scales = int4(moments, weight)
    pairs = [by_definition(w.numpy(), m.numpy(), 32) for w, m in zip(weights, moments, strict=True)]
    assert np.array_equal(codes.numpy(), np.concatenate([own for own, _ in pairs], 1))
    assert np.array_equal(scales.numpy(), np.concatenate([own for _, own in pairs], 1))
    codes, scales = int8(moments, weight)
    row_scales = weight.abs().amax(1).numpy() / np.float32(127)  # of the whole row
    wholes = [int8_by_definition(w.numpy(), m.numpy(), row_scales)[0] for w, m in zip(weights, moments, strict=True)]
    assert np.array_equal(codes.numpy(), np.concatenate(wholes, 1)) and np.array_equal(scales.numpy(), row_scales)


@given(channels=st.integers(1, 20000), group_size=st.sampled_from((32, 64, 96, 4096)))
@example(channels=2048, group_size=32)
@example(channels=2080, group_size=32)
def test_stretches_are_few_and_equal_and_cut_no_group(channels: int, group_size: int) -> None:
    sizes = gptq.stretches(channels, group_size)
    unit = group_size if channels % group_size == 0 else 1
    assert sum(sizes) == channels and all(size % unit == 0 for size in sizes)
    assert max(sizes) - min(sizes) <= unit and max(sizes) <= max(gptq.COLUMNS_TOGETHER, unit)
    assert len(sizes) == 1 or channels > gptq.COLUMNS_TOGETHER // unit * unit


def test_the_error_on_the_inputs_is_far_below_that_of_rounding_to_the_nearest() -> None:
    inputs, weight = correlated(1000, 128), weight_of(64, 128)

    def error(grid: tuple[torch.Tensor, torch.Tensor]) -> float:
        codes, scales = grid[0], grid[1].view(len(weight), -1)
        rounded = (codes.view(*scales.shape, -1) * scales[..., None]).view(weight.shape)
        return float((inputs @ (rounded - weight).T).square().mean())

    moments = inputs.T @ inputs / len(inputs)
    assert error(int4([moments], weight)) < 0.5 * error(int4_per_group(weight, 32))
    assert error(int8([moments], weight)) < 0.6 * error(int8_per_row(weight))


def test_rows_do_not_depend_on_the_block_they_are_in(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, weight = correlated(300, 64), weight_of(11, 64)
    moments = inputs.T @ inputs
    whole = *int4([moments], weight), *int8([moments], weight)
    monkeypatch.setattr(gptq, "ROWS_AT_A_TIME", 4)
    parts = *int4([moments], weight), *int8([moments], weight)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_channels_that_are_never_used_and_rows_of_zeros() -> None:
    inputs = correlated(300, 64)
    inputs[:, 10:20] = 0
    weight = weight_of(5, 64)
    weight[2] = 0
    for moments in (inputs.T @ inputs, torch.zeros(64, 64)):
        for codes, scales in (int4([moments], weight), int8([moments], weight)):
            assert torch.isfinite(scales).all() and (scales > 0).all()
            assert not codes[2].any() and codes[3].any()


def test_of_inputs_that_do_not_depend_on_each_other_it_is_the_nearest_code() -> None:
    weight = weight_of(6, 64)
    codes, scales = int4([torch.eye(64)], weight)
    nearest = (weight.view(6, 2, 32) / scales[..., None]).round().clamp(-8, 7)
    assert torch.equal(codes.view(6, 2, 32).float(), nearest)
    assert torch.equal(int8([torch.eye(64)], weight)[0], int8_per_row(weight)[0])
