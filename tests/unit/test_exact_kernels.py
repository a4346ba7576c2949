"""The kernels of an exact head inside a `.pte`: the largest of many logits, and rows times a vector."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from executorch.exir import to_edge
from executorch.runtime import Runtime, Verification
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.export import export

from exporter.backends.executorch import kernels
from exporter.backends.executorch import runtime as pte
from exporter.backends.executorch.ring_kernels import use_ring_kernels

pte.prepare()
# Below and above a 32nd of the row; lengths that fill no block, and none that is whole.
SHAPES = ((5000, 40), (5000, 156), (5000, 157), (4096, 1), (97, 3), (2049, 64), (70_001, 1024))


class Largest(torch.nn.Module):
    def __init__(self, count: int, in_order: bool) -> None:
        super().__init__()
        self.count, self.in_order = count, in_order

    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = logits.topk(self.count, -1, sorted=self.in_order)
        return values, indices


class Rows(torch.nn.Module):
    def forward(self, x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        return kernels.mixed_linear(x, codes, scales)


@cache
def program(module: tuple[Any, ...], shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...]) -> bytes:
    """The runtime reads these bytes for as long as a method is loaded."""
    make, *arguments = module
    inputs = tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in shapes)
    return to_edge(export(make(*arguments), inputs, strict=False)).to_executorch().buffer


@cache
def method(module: tuple[Any, ...], shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...], ring: bool) -> Any:
    assert use_ring_kernels(ring) == ring
    loaded = Runtime.get().load_program(program(module, shapes), verification=Verification.Minimal)
    return loaded.load_method("forward")


def largest(logits: Tensor, count: int, *, in_order: bool = True, ring: bool = True) -> tuple[Tensor, Tensor]:
    loaded = method((Largest, count, in_order), ((tuple(logits.shape), torch.float32),), ring)
    values, indices = loaded.execute([logits])
    return values.clone(), indices.clone()


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize(("size", "count"), SHAPES)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**20), kind=st.sampled_from(("spread", "equal", "few values", "ascending", "infinite")))
def test_the_largest_by_sorting_all(size: int, count: int, in_order: bool, seed: int, kind: str) -> None:
    generator = np.random.default_rng(seed)
    row = generator.normal(size=size).astype(np.float32)
    row = {
        "spread": row, "equal": np.zeros_like(row), "few values": np.round(row), "ascending": np.sort(row),
        "infinite": np.where(generator.random(size) < 0.01, np.copysign(np.inf, row), row),
    }[kind]  # fmt: skip
    values, indices = largest(torch.from_numpy(row)[None], count, in_order=in_order)
    want = np.sort(row)[::-1][:count]
    got = values[0].numpy()
    np.testing.assert_array_equal(got if in_order else np.sort(got)[::-1], want)
    np.testing.assert_array_equal(row[indices[0].numpy()], got)
    assert len(set(indices[0].tolist())) == count
    if in_order and 64 * count <= size and size > 4096:
        by_place = sorted(range(size), key=lambda place: (-row[place], place))[:count]
        assert indices[0].tolist() == by_place, "of equal ones the first"


def test_a_row_with_nan_goes_to_the_kernel_that_was_there() -> None:
    logits = torch.zeros(1, 5000)
    logits[0, 17], logits[0, 4999] = float("nan"), 3.0
    for ring in (True, False):
        values, _ = largest(logits, 40, ring=ring)
        assert values.isnan().sum() == 1 and (values == 3.0).sum() == 1


@pytest.mark.parametrize(("rows", "columns", "groups"), [(9, 64, 2), (300, 640, 20), (130, 576, 18), (1, 32, 1)])
@pytest.mark.parametrize("ring", [True, False])
def test_rows_times_a_vector_by_definition(rows: int, columns: int, groups: int, ring: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(1, columns, generator=generator)
    codes = torch.randint(-127, 128, (rows, columns), generator=generator, dtype=torch.int8)
    scales = torch.rand(rows, groups, generator=generator) + 0.1
    shapes = tuple((tuple(one.shape), one.dtype) for one in (x, codes, scales))
    got = method((Rows,), shapes, ring).execute([x, codes, scales])[0].clone()
    want = torch.zeros(1, rows, dtype=torch.float64)
    for n in range(rows):
        for k in range(columns):
            want[0, n] += float(codes[n, k]) * float(scales[n, k // (columns // groups)]) * float(x[0, k])
    assert got.shape == (1, rows)
    assert (got - want).abs().max() < 3e-6 * float(want.abs().max()) * columns**0.5
    assert torch.allclose(kernels.mixed_linear(x, codes, scales).double(), want, rtol=1e-4, atol=1e-2)
