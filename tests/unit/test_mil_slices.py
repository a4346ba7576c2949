"""Slices, updates and gathers against loops that follow the documentation index by index."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from mil_operators import call, randoms, same


def indices(
    size: int, begin: int, end: int, stride: int, *, begin_mask: bool = False, end_mask: bool = False
) -> list[int]:
    """The indices that a Python slice takes of an axis, one step at a time."""
    if stride > 0:
        start = 0 if begin_mask else max(0, begin + size if begin < 0 else begin)
        stop = size if end_mask else min(size, end + size if end < 0 else end)
    else:
        start = size - 1 if begin_mask else min(size - 1, begin + size if begin < 0 else begin)
        stop = -1 if end_mask else max(-1, end + size if end < 0 else end)
    taken = []
    while (start < stop) if stride > 0 else (start > stop):
        taken.append(start)
        start += stride
    return taken


BOUNDS = [-9, -5, -4, -1, 0, 1, 3, 4, 5, 9]


@pytest.mark.parametrize("stride", [1, 2, 3, -1, -2])
@pytest.mark.parametrize(("begin_mask", "end_mask"), [(False, False), (True, False), (False, True)])
def test_slice_by_index_of_one_axis(begin_mask: bool, end_mask: bool, stride: int) -> None:
    x = randoms((5,))
    for begin, end in product(BOUNDS, BOUNDS):
        taken = indices(5, begin, end, stride, begin_mask=begin_mask, end_mask=end_mask)
        ours = call("slice_by_index", x=x, begin=(begin,), end=(end,), stride=(stride,),
                    begin_mask=(begin_mask,), end_mask=(end_mask,))  # fmt: skip
        same(ours, np.array([x[i] for i in taken], np.float32))


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "float32", "int32", "bool"])
def test_slice_by_index_of_several_axes(dtype: str, constant: bool) -> None:
    x = randoms((3, 4, 5)).astype(dtype)

    def integers(*values: int) -> Any:
        return values if constant else np.array(values, np.int32)

    ours = call("slice_by_index", x=x, begin=integers(-2, 3, 0), end=integers(3, 0, -1), stride=integers(1, -1, 2))
    expected = np.zeros((2, 3, 2), dtype)
    for i, j, k in product(range(2), range(3), range(2)):
        expected[i, j, k] = x[1 + i, 3 - j, 2 * k]
    same(ours, expected)


def test_slice_by_index_squeezes_what_it_indexes() -> None:
    x = randoms((3, 4))
    bounds = {"begin": (-1, 1), "end": (0, 3)}  # the end of an indexed axis is not looked at
    same(call("slice_by_index", x=x, **bounds, squeeze_mask=(True, False)), x[2][1:3].copy())
    same(call("slice_by_index", x=x, **bounds, squeeze_mask=(True, True)), np.array(x[2][1]))
    same(call("slice_by_index", x=x, **bounds, begin_mask=(True, True), squeeze_mask=(True, False)), x[0][:3].copy())
    for begin in (3, -4):
        with pytest.raises(ValueError, match=f"index {begin} of an axis of 3"):
            call("slice_by_index", x=x, begin=(begin, 0), end=(0, 4), squeeze_mask=(True, False))


def test_slice_by_index_refuses_a_stride_of_nothing_and_the_wrong_rank() -> None:
    with pytest.raises(ValueError, match="stride 0"):
        call("slice_by_index", x=randoms((3,)), begin=(0,), end=(3,), stride=(0,))
    with pytest.raises(ValueError, match="1 axes for rank 2"):
        call("slice_by_index", x=randoms((3, 3)), begin=(0,), end=(3,))


@pytest.mark.parametrize("stride", [1, 2, -1, -2])
def test_slice_update(stride: int) -> None:
    x = randoms((5, 2))
    for begin, end in product((-4, 0, 1, 4), (-5, -1, 3, 5)):
        taken = indices(5, begin, end, stride)
        update = randoms((len(taken), 2), seed=1)
        expected = x.copy()
        for row, i in enumerate(taken):
            expected[i] = update[row]
        before = x.copy()
        same(call("slice_update", x=x, update=update, begin=(begin, 0), end=(end, 0), stride=(stride, 1),
                  end_mask=(False, True)), expected)  # fmt: skip
        same(x, before)


def test_slice_update_of_an_indexed_axis_and_of_the_wrong_shape() -> None:
    x, row = randoms((3, 4)), randoms((4,), seed=1)
    masks = {"squeeze_mask": (True, False), "end_mask": (False, True)}
    expected = x.copy()
    expected[1] = row
    same(call("slice_update", x=x, update=row, begin=np.array([1, 0], np.int32), end=(0, 0), **masks), expected)
    with pytest.raises(ValueError, match=r"an update \[3\] of a slice \[4\]"):
        call("slice_update", x=x, update=row[:3], begin=(1, 0), end=(0, 0), **masks)
    # numpy would stretch this one; the operator asks for the slice's own shape.
    with pytest.raises(ValueError, match=r"an update \[1, 4\] of a slice \[2, 4\]"):
        call("slice_update", x=x, update=row[None], begin=(0, 0), end=(2, 4))


def test_slice_by_size() -> None:
    x = randoms((4, 5))
    same(call("slice_by_size", x=x, begin=(1, 2), size=(2, -1)), x[1:3, 2:].copy())
    same(
        call("slice_by_size", x=x, begin=np.array([-2, 0], np.int32), size=np.array([2, 1], np.int32)), x[2:, :1].copy()
    )
    for begin, size in (((3, 0), (2, 1)), ((5, 0), (-1, 1)), ((-5, 0), (1, 1))):
        with pytest.raises(ValueError, match="of an axis of 4"):
            call("slice_by_size", x=x, begin=begin, size=size)


def gathered(x: np.ndarray, at: np.ndarray, axis: int, batch: int) -> np.ndarray:
    """output[b, p, i, r] = x[b, p, at[b, i], r], where b are the batch axes, p those before `axis`, r those after."""
    out = np.zeros(x.shape[:axis] + at.shape[batch:] + x.shape[axis + 1 :], x.dtype)
    width = at.ndim - batch
    for place in np.ndindex(*out.shape):
        before, middle, after = place[:axis], place[axis : axis + width], place[axis + width :]
        out[place] = x[(*before, at[(*before[:batch], *middle)], *after)]
    return out


@pytest.mark.parametrize("kind", ["int32", "uint8", "int8", "int16"])
@pytest.mark.parametrize(
    ("axis", "batch", "shape"),
    [(0, 0, ()), (0, 0, (3,)), (1, 0, (2, 2)), (-1, 0, (4,)), (2, 0, ()), (1, 1, (2, 3)), (2, 1, (2, 2)),
     (2, 2, (2, 4, 3)), (1, 1, (2,))],
)  # fmt: skip
def test_gather(axis: int, batch: int, shape: tuple[int, ...], kind: str) -> None:
    x = randoms((2, 4, 5))
    at = np.random.default_rng(7).integers(0, x.shape[axis], shape).astype(kind)
    same(call("gather", x=x, indices=np.asarray(at), axis=axis, batch_dims=batch), gathered(x, at, axis % 3, batch))


@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("index", [-1, 4])
def test_gathers_refuse_an_index_that_the_opset_leaves_undefined(index: int, validate: bool) -> None:
    x, at = randoms((4, 4)), np.array([0, index], np.int32)
    with pytest.raises(ValueError, match=f"index {index} of an axis of 4"):
        call("gather", x=x, indices=at, validate_indices=validate)
    with pytest.raises(ValueError, match=f"index {index} of an axis of 4"):
        call("gather_along_axis", x=x, indices=np.tile(at[:, None], (1, 4)), validate_indices=validate)
    with pytest.raises(ValueError, match=f"index {index} of an axis of 4"):
        call("gather_nd", x=x, indices=at[:, None], validate_indices=validate)


def test_gather_refuses_batches_that_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="batch_dims"):
        call("gather", x=randoms((2, 4)), indices=np.zeros((3, 1), np.int32), axis=1, batch_dims=1)
    with pytest.raises(ValueError, match="batch_dims 1 with axis 0"):
        call("gather", x=randoms((2, 4)), indices=np.zeros((2, 1), np.int32), axis=0, batch_dims=1)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gather_along_axis(axis: int) -> None:
    x = randoms((3, 4))
    shape = (5, 4) if axis == 0 else (3, 5)
    at = np.random.default_rng(2).integers(0, x.shape[axis], shape).astype(np.int32)
    expected = np.zeros(shape, np.float32)
    for i, j in np.ndindex(*shape):
        expected[i, j] = x[at[i, j], j] if axis == 0 else x[i, at[i, j]]
    same(call("gather_along_axis", x=x, indices=at, axis=axis), expected)
    with pytest.raises(ValueError, match="along axis"):
        call("gather_along_axis", x=x, indices=at[:2, :2], axis=axis)


def test_gather_nd() -> None:
    x = randoms((2, 3, 4))
    at = np.array([[[0, 2], [1, 0]], [[1, 1], [0, 0]]], np.int32)  # [2, 2, 2]
    plain, batched = np.zeros((2, 2, 4), np.float32), np.zeros((2, 2), np.float32)
    for i, j in np.ndindex(2, 2):
        a, b = at[i, j]
        plain[i, j] = x[a, b]
        batched[i, j] = x[i, a, b]
    same(call("gather_nd", x=x, indices=at), plain)
    same(call("gather_nd", x=x, indices=at, batch_dims=1), batched)
    with pytest.raises(ValueError, match="batch_dims"):
        call("gather_nd", x=x, indices=at[:1], batch_dims=1)
