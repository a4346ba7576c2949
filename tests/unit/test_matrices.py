"""The values that are left of a matrix on each grid, from the definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from exporter.grids import base, grid
from exporter.grids.base import Stored
from exporter.grids.int4 import int4_per_group
from exporter.grids.int4_shifted import int4_shifted_per_group
from exporter.grids.int8 import int8_per_row


def matrix(rows: int = 48, columns: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def stored(weight: torch.Tensor, name: str) -> Stored:
    return grid(name).store(weight, 32 if grid(name).grouped else None)


def test_floats_are_the_numbers_that_their_dtype_has() -> None:
    weight = matrix()
    weight[0, 0] = 1e-9  # below the smallest of float16
    assert torch.equal(stored(weight, "float32").values(), weight)
    half = stored(weight, "float16")
    assert half.codes.dtype is torch.float16
    np.testing.assert_array_equal(half.values().numpy(), weight.numpy().astype(np.float16).astype(np.float32))


def test_int8_is_the_grid_row_by_row() -> None:
    weight = matrix()
    integers, scales = int8_per_row(weight)
    got = stored(weight, "int8").values()
    for row, column in np.ndindex(48, 64):
        assert float(got[row, column]) == float(integers[row, column] * scales[row])


def test_int4_has_a_step_for_every_32_columns() -> None:
    weight = matrix()
    integers, scales = int4_per_group(weight, 32)
    got = stored(weight, "int4").values()
    for row, column in np.ndindex(48, 64):
        assert float(got[row, column]) == float(integers[row, column] * scales[row, column // 32])


def test_a_palette_has_16_values_for_a_row() -> None:
    weight = matrix()
    got = stored(weight, "palettized4").values()
    for row in range(48):
        values = got[row].unique()
        assert len(values) <= 16
        nearest = values[(weight[row, :, None] - values).abs().argmin(-1)]
        # The middle between two entries decides; a weight there may go either way.
        assert (got[row] - nearest).abs().max() < 1e-3


def shifted_by_definition(group: np.ndarray) -> tuple[list[int], np.float32, int]:
    """16 levels from the smallest weight or 0 to the largest or 0. coreai-opt 0.3.0 adds 1e-6 to the range."""
    low, high = min(group.min(), np.float32(0)), max(group.max(), np.float32(0))
    scale = (high - low + np.float32(1e-6)) / np.float32(15)
    zero = int(np.clip(np.round((-8 * high - 7 * low) / (high - low + np.float32(1e-6))), -8, 7))
    return [int(np.clip(np.round(w / scale) + zero, -8, 7)) for w in group], scale, zero


def test_shifted_int4_covers_the_range_of_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("coreai_opt")
    weight = matrix(seed=1)
    weight[3] += 5  # all positive
    weight[4] = -weight[4].abs()
    weight[5] = 0
    codes, scales, zero_points = int4_shifted_per_group(weight, 32)
    assert codes.dtype == zero_points.dtype == torch.int8 and codes.min() == -8 and codes.max() == 7
    for row, group in np.ndindex(48, 2):
        part = slice(32 * group, 32 * group + 32)
        want, scale, zero = shifted_by_definition(weight[row, part].numpy())
        assert codes[row, part].tolist() == want
        assert (float(scales[row, group]), int(zero_points[row, group])) == (float(scale), zero)
    found = stored(weight, "int4_shifted").values()
    for row, column in np.ndindex(48, 64):
        level = int(codes[row, column]) - int(zero_points[row, column // 32])
        assert float(found[row, column]) == float(np.float32(level) * scales[row, column // 32].numpy())
    monkeypatch.setattr(base, "ELEMENTS_AT_A_TIME", 5 * 64)
    parts = int4_shifted_per_group(weight, 32)
    assert all(torch.equal(a, b) for a, b in zip(parts, (codes, scales, zero_points), strict=True))
