"""Operators that move elements, against loops over places."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from mil_operators import FLOATS, call, randoms, same

TYPES = [*FLOATS, "int32", "bool"]


@pytest.mark.parametrize("dtype", TYPES)
def test_shape_and_identity(dtype: str) -> None:
    x = randoms((2, 3, 4)).astype(dtype)
    same(call("shape", x=x), np.array([2, 3, 4], np.int32))
    same(call("shape", x=np.array(1.0, np.float32)), np.zeros(0, np.int32))
    same(call("identity", x=x), x)


@pytest.mark.parametrize(
    ("source", "shape", "result"),
    [
        ((2, 6), (3, 4), (3, 4)),
        ((2, 6), (-1, 3), (4, 3)),
        ((2, 50), (1, 0, -1, 0), (1, 1, 2, 50)),  # the documentation's own example
        ((2, 3, 4), (0, -1), (3, 8)),  # a 0 counts from the end, not from the front
        ((2, 3, 4), (0, 0, 0), (2, 3, 4)),
        ((2, 3, 4), (2, 0, -1), (2, 3, 4)),
        ((6,), (0, 2, 3), (1, 2, 3)),  # x has no such axis
        ((), (1, 1), (1, 1)),
        ((1, 1), (), ()),
    ],
)
@pytest.mark.parametrize("constant", [True, False])
def test_reshape(source: tuple[int, ...], shape: tuple[int, ...], result: tuple[int, ...], constant: bool) -> None:
    x = randoms(source)
    given = shape if constant else np.array(shape, np.int32)
    same(call("reshape", x=x, shape=given), np.array(x.flatten().tolist(), np.float32).reshape(result))


@pytest.mark.parametrize("shape", [(5, -1), (-1, -1), (-2, 3), (0, 4)])
def test_reshape_refuses_what_does_not_fit(shape: tuple[int, ...]) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        call("reshape", x=randoms((2, 3)), shape=shape)


def test_expand_dims_and_squeeze() -> None:
    x = randoms((2, 3))
    assert call("expand_dims", x=x, axes=(0,)).shape == (1, 2, 3)
    assert call("expand_dims", x=x, axes=(-1, 1)).shape == (2, 1, 3, 1)  # places of the result
    assert call("expand_dims", x=np.array(1.0, np.float32), axes=(0, 1)).shape == (1, 1)
    for axes in ((4,), (0, 0), (-5,)):
        with pytest.raises(ValueError, match="axes"):
            call("expand_dims", x=x, axes=axes)
    y = randoms((1, 2, 1, 3))
    assert call("squeeze", x=y).shape == (2, 3)
    assert call("squeeze", x=y, axes=(-2,)).shape == (1, 2, 3)
    assert call("squeeze", x=y, axes=(0, 1)).shape == (2, 1, 3)  # an axis of 2 stays
    same(call("squeeze", x=y).flatten(), y.flatten())


@pytest.mark.parametrize("dtype", TYPES)
def test_transpose_and_reverse(dtype: str) -> None:
    x = randoms((2, 3, 4)).astype(dtype)
    expected, back = np.zeros((4, 2, 3), dtype), np.zeros((2, 3, 4), dtype)
    for i, j, k in np.ndindex(2, 3, 4):
        expected[k, i, j], back[1 - i, j, 3 - k] = x[i, j, k], x[i, j, k]
    same(call("transpose", x=x, perm=(2, 0, 1)), expected)
    same(call("transpose", x=x, perm=(-1, 0, -2)), expected)
    same(call("reverse", x=x, axes=(0, -1)), back)
    same(call("reverse", x=x), x.flatten()[::-1].reshape(2, 3, 4))


def test_concat() -> None:
    # The documentation's own example.
    a, b = np.array([[1, 2], [3, 4], [5, 6]]), np.array([[7, 8], [9, 10], [11, 12]])
    same(call("concat", values=[a, b], axis=0), np.array([[1, 2], [3, 4], [5, 6], [7, 8], [9, 10], [11, 12]]))
    interleaved = np.array([[1, 2], [7, 8], [3, 4], [9, 10], [5, 6], [11, 12]])
    same(call("concat", values=[a, b], axis=0, interleave=True), interleaved)
    same(call("concat", values=[a, b], axis=-2, interleave=True), interleaved)
    same(call("concat", values=[a, b[:, :1]], axis=-1), np.array([[1, 2, 7], [3, 4, 9], [5, 6, 11]]))
    same(call("concat", values=[a], axis=0), a)
    scalars = [np.array(4, np.int32), np.array([5, 6], np.int32)]
    same(call("concat", values=scalars, axis=0), np.array([4, 5, 6], np.int32))
    with pytest.raises(ValueError, match="different shapes"):
        call("concat", values=[a, b[:2]], axis=0, interleave=True)


def test_stack_and_split() -> None:
    a, b = randoms((2, 3)), randoms((2, 3), seed=1)
    stacked = call("stack", values=[a, b], axis=1)
    assert stacked.shape == (2, 2, 3)
    same(stacked[:, 0], a)
    same(stacked[:, 1], b)
    same(call("stack", values=[np.array(1.0), np.array(2.0)], axis=0), np.array([1.0, 2.0]))
    x = randoms((6, 2))
    for parts, starts in ((call("split", x=x, axis=0, num_splits=3), (0, 2, 4)),
                          (call("split", x=x, axis=-2, split_sizes=(1, 2, 3)), (0, 1, 3))):  # fmt: skip
        for part, start in zip(parts, starts, strict=True):
            same(part, x[start : start + len(part)])
    for wrong in ({"num_splits": 4}, {}, {"split_sizes": (1, 2)}, {"num_splits": 2, "split_sizes": (1, 2, 3)}):
        with pytest.raises(ValueError, match="parts"):
            call("split", x=x, axis=0, **wrong)


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
def test_tile(dtype: str, constant: bool) -> None:
    x = randoms((2, 3)).astype(dtype)
    expected = np.zeros((4, 9), dtype)
    for i, j in np.ndindex(4, 9):
        expected[i, j] = x[i % 2, j % 3]
    same(call("tile", x=x, reps=(2, 3) if constant else np.array([2, 3], np.int32)), expected)
    for wrong in ((2,), (0, 1)):
        with pytest.raises(ValueError, match="reps"):
            call("tile", x=x, reps=wrong)


@pytest.mark.parametrize("dtype", TYPES)
def test_fill(dtype: str) -> None:
    value = np.array(3).astype(dtype)
    same(call("fill", shape=(2, 3), value=value), np.array([[3] * 3] * 2).astype(dtype))
    same(call("fill", shape=np.array([2], np.int32)), np.zeros(2, np.float32))
    same(call("fill_like", ref_tensor=np.zeros((1, 2), np.int32), value=value), np.array([[3, 3]]).astype(dtype))


@pytest.mark.parametrize("dtype", [*FLOATS, "int32"])
@pytest.mark.parametrize(("start", "end", "step"), [(0, 5, 1), (2, 9, 3), (5, 0, -2), (3, 3, 1), (4, 1, 1)])
def test_range_1d(start: int, end: int, step: int, dtype: str) -> None:
    expected, value = [], start
    while (value < end) if step > 0 else (value > end):
        expected.append(value)
        value += step
    bounds = {"start": np.array(start, dtype), "end": np.array(end, dtype), "step": np.array(step, dtype)}
    same(call("range_1d", **bounds), np.array(expected).astype(dtype))


def test_range_1d_of_halves_counts_past_2048_as_halves_do() -> None:
    bounds = {name: np.array(v, np.float16) for name, v in (("start", 2047), ("end", 2052), ("step", 1))}
    same(call("range_1d", **bounds), np.array([2047, 2048, 2048, 2050, 2052], np.float16))


def test_one_hot() -> None:
    indices = np.array([[0, 2], [1, 5]], np.int32)
    expected = np.zeros((2, 3, 2), np.float16) - np.float16(1)
    for i, j in np.ndindex(2, 2):
        if indices[i, j] < 3:
            expected[i, indices[i, j], j] = 7
    on, off = np.array(7, np.float16), np.array(-1, np.float16)
    same(call("one_hot", indices=indices, one_hot_vector_size=3, axis=1, on_value=on, off_value=off), expected)
    assert call("one_hot", indices=indices, one_hot_vector_size=3)[1, 0].tolist() == [0, 1, 0]


def test_non_zero_and_band_part() -> None:
    same(call("non_zero", x=np.array([[0, 3], [4, 0]], np.int32)), np.array([[0, 1], [1, 0]], np.int32))
    x = randoms((2, 3, 4))
    for lower, upper in ((-1, 0), (0, -1), (0, 0), (1, 2), (-1, -1)):
        expected = np.zeros_like(x)
        for b, m, n in np.ndindex(*x.shape):
            if (lower < 0 or m - n <= lower) and (upper < 0 or n - m <= upper):
                expected[b, m, n] = x[b, m, n]
        same(call("band_part", x=x, lower=lower, upper=upper), expected)


def padded(x: np.ndarray, amounts: Sequence[tuple[int, int]], mode: str, value: float) -> np.ndarray:
    out = np.zeros([n + before + after for n, (before, after) in zip(x.shape, amounts, strict=True)], x.dtype)
    for place in np.ndindex(*out.shape):
        at = [i - before for i, (before, _) in zip(place, amounts, strict=True)]
        outside = any(not 0 <= i < n for i, n in zip(at, x.shape, strict=True))
        if mode == "reflect":
            at = [-i if i < 0 else 2 * (n - 1) - i if i >= n else i for i, n in zip(at, x.shape, strict=True)]
        elif mode == "replicate":
            at = [min(max(i, 0), n - 1) for i, n in zip(at, x.shape, strict=True)]
        out[place] = value if outside and mode == "constant" else x[tuple(at)]
    return out


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate"])
def test_pad(mode: str) -> None:
    x = randoms((2, 3, 4))
    same(call("pad", x=x, pad=(1, 2, 3, 0), mode=mode, constant_val=np.float32(9)),
         padded(x, [(0, 0), (1, 2), (3, 0)], mode, 9.0))  # fmt: skip
    whole = np.array([1, 0, 0, 0, 0, 1], np.int32)
    same(call("pad", x=x, pad=whole, mode=mode), padded(x, [(1, 0), (0, 0), (0, 1)], mode, 0.0))


def test_pad_refuses_more_than_there_is_to_mirror() -> None:
    with pytest.raises(ValueError, match="reflection"):
        call("pad", x=randoms((2, 3)), pad=(3, 0), mode="reflect")
    with pytest.raises(ValueError, match="mode circular"):
        call("pad", x=randoms((2, 3)), pad=(1, 0), mode="circular")
    assert math.prod(call("pad", x=randoms((2, 3)), pad=()).shape) == 6
