"""Element-wise operators against their definitions, an element at a time in float64 or in Python integers."""

import math
import operator as python
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mil_operators import FLOATS, call, close, randoms, same

Binary = Callable[[Any, Any], Any]
ARITHMETIC: dict[str, Binary] = {
    "add": python.add, "sub": python.sub, "mul": python.mul,
    "maximum": lambda x, y: x if x > y else y, "minimum": lambda x, y: y if x > y else x,
}  # fmt: skip
COMPARISONS: dict[str, Binary] = {
    "equal": python.eq, "not_equal": python.ne, "greater": python.gt, "greater_equal": python.ge, "less": python.lt,
    "less_equal": python.le,
}  # fmt: skip
LOGIC: dict[str, Binary] = {
    "logical_and": lambda x, y: x and y, "logical_or": lambda x, y: x or y, "logical_xor": python.ne,
}  # fmt: skip


def each(function: Binary, x: np.ndarray, y: np.ndarray, dtype: str) -> np.ndarray:
    """`function` of every pair, shapes broadcast by hand: aligned at the end, an axis of 1 stretches."""
    rank = max(x.ndim, y.ndim)
    x, y = (a.reshape((1,) * (rank - a.ndim) + a.shape) for a in (x, y))
    shape = tuple(max(a, b) for a, b in zip(x.shape, y.shape, strict=True))
    out = np.zeros(shape, dtype)
    for place in np.ndindex(*shape):
        a, b = (v[tuple(0 if size == 1 else i for i, size in zip(place, v.shape, strict=True))].item() for v in (x, y))
        out[place] = function(a, b)
    return out


SHAPES = [((3, 4), (3, 4)), ((2, 1, 3), (4, 1)), ((), (2, 2)), ((1,), (3,))]


@pytest.mark.parametrize("dtype", [*FLOATS, "int32"])
@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic(name: str, dtype: str) -> None:
    for seed, (left, right) in enumerate(SHAPES):
        x, y = randoms(left, dtype, seed), randoms(right, dtype, seed + 50)
        # A double holds the exact sum, difference or product of two halves; of floats it rounds twice harmlessly.
        same(call(name, x=x, y=y), each(ARITHMETIC[name], x, y, dtype))


@pytest.mark.parametrize("name", ["add", "sub", "mul", "real_div"])
def test_float16_arithmetic_is_the_exact_result_rounded_once(name: str) -> None:
    codes = np.random.default_rng(3).integers(0, 1 << 16, (2, 200_000)).astype(np.uint16)
    x, y = codes.view(np.float16)  # every kind of half: subnormal, infinite, NaN
    exact = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "real_div": np.divide}[name]
    with np.errstate(all="ignore"):
        expected = exact(x.astype(np.float64), y.astype(np.float64)).astype(np.float16)
    np.testing.assert_array_equal(call(name, x=x, y=y), expected)


def test_float16_overflows_to_infinity_and_float32_does_not_at_that_size() -> None:
    for dtype, expected in (("float16", math.inf), ("float32", 90000.0)):
        assert call("mul", x=np.array([300.0], dtype), y=np.array([300.0], dtype))[0] == expected
    # 65504 is the largest half; 65519.99 rounds down to it, 65520 rounds to infinity.
    assert call("add", x=np.array([65504.0], np.float16), y=np.array([15.99], np.float16))[0] == 65504
    assert call("add", x=np.array([65504.0], np.float16), y=np.array([16.0], np.float16))[0] == math.inf


def test_int32_wraps() -> None:
    big = np.array([2**31 - 1], np.int32)
    assert call("add", x=big, y=np.array([1], np.int32))[0] == -(2**31)
    assert call("mul", x=big, y=np.array([2], np.int32))[0] == -2


def test_a_nan_loses_the_comparison_of_maximum_and_minimum() -> None:
    nan, one = np.array([math.nan], np.float32), np.array([1.0], np.float32)
    assert call("maximum", x=nan, y=one)[0] == 1.0 and math.isnan(call("maximum", x=one, y=nan)[0])
    assert call("minimum", x=one, y=nan)[0] == 1.0 and math.isnan(call("minimum", x=nan, y=one)[0])


@pytest.mark.parametrize("dtype", [*FLOATS, "int32"])
def test_floor_div_and_mod_round_down_and_take_the_divisors_sign(dtype: str) -> None:
    x = np.array([7, -7, 7, -7, 6, -6, 0, 1, -1], dtype)
    y = np.array([3, 3, -3, -3, 3, 3, 5, 8, 8], dtype)
    same(call("floor_div", x=x, y=y), np.array([2, -3, -3, 2, 2, -2, 0, 0, -1], dtype))
    same(call("mod", x=x, y=y), np.array([1, 2, -2, -1, 0, 0, 0, 1, 7], dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_floor_div_and_mod_of_fractions(dtype: str) -> None:
    x, y = randoms((200,), dtype), randoms((200,), dtype, 9)
    quotient = [math.floor(a / b) for a, b in zip(x.astype(float), y.astype(float), strict=True)]
    same(call("floor_div", x=x, y=y), np.array(quotient).astype(dtype))
    exact = np.array([a - b * math.floor(a / b) for a, b in zip(x.astype(float), y.astype(float), strict=True)])
    # The remainder of floats is exact up to float32's last bit of the larger argument.
    np.testing.assert_allclose(call("mod", x=x, y=y).astype(float), exact, rtol=2e-3, atol=1e-5)


def test_real_div_of_integers_is_whole_or_refused() -> None:
    x = np.array([6, -6, 0], np.int32)
    same(call("real_div", x=x, y=np.array([3, 3, 5], np.int32)), np.array([2, -2, 0], np.int32))
    for divisor in (4, 0):
        with pytest.raises(ValueError, match="not whole"):
            call("real_div", x=x, y=np.array(divisor, np.int32))


@pytest.mark.parametrize("dtype", FLOATS)
def test_pow(dtype: str) -> None:
    x, y = np.abs(randoms((50,), dtype)) + np.array(0.1, dtype), randoms((50,), dtype, 4)
    close(call("pow", x=x, y=y), x.astype(float) ** y.astype(float), dtype, 4 if dtype == "float32" else 1)
    same(call("pow", x=np.array([-3.0], dtype), y=np.array([3.0], dtype)), np.array([-27.0], dtype))
    same(call("pow", x=np.array([-3], np.int32), y=np.array([3], np.int32)), np.array([-27], np.int32))


@pytest.mark.parametrize("dtype", [*FLOATS, "int32"])
@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons(name: str, dtype: str) -> None:
    for seed, (left, right) in enumerate(SHAPES):
        x, y = np.round(randoms(left, dtype, seed)), np.round(randoms(right, dtype, seed + 50))
        same(call(name, x=x.astype(dtype), y=y.astype(dtype)), each(COMPARISONS[name], x, y, "bool"))


@pytest.mark.parametrize("name", LOGIC)
def test_logic(name: str) -> None:
    x, y = np.array([[True], [False]]), np.array([True, False])
    same(call(name, x=x, y=y), each(LOGIC[name], x, y, "bool"))
    same(call("logical_not", x=y), np.array([False, True]))


UNARY: dict[str, Callable[[float], float]] = {
    "abs": abs, "square": lambda v: v * v, "ceil": math.ceil, "floor": math.floor, "exp": math.exp,
    "exp2": lambda v: 2.0**v, "erf": math.erf, "cos": math.cos, "sin": math.sin, "tanh": math.tanh,
    "sign": lambda v: 0.0 if v == 0 else math.copysign(1.0, v),
}  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", UNARY)
def test_unary(name: str, dtype: str) -> None:
    x = np.concatenate([randoms((300,), dtype), np.array([0, 0.5, -0.5, 3, -9.25], dtype)])
    close(call(name, x=x), np.array([float(UNARY[name](v)) for v in x.tolist()]), dtype, 2)


@pytest.mark.parametrize("dtype", FLOATS)
def test_round_takes_halves_to_the_even_integer(dtype: str) -> None:
    same(call("round", x=np.array([0.5, 1.5, 2.5, -0.5, -1.5, 0.6], dtype)), np.array([0, 2, 2, -0.0, -2, 1], dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_roots_inverses_and_logarithms_add_their_epsilon_first(dtype: str) -> None:
    x = np.abs(randoms((100,), dtype)) + np.array(0.01, dtype)
    wide, epsilon = x.astype(float), np.array(0.25, dtype)
    close(call("sqrt", x=x), np.sqrt(wide), dtype)
    close(call("rsqrt", x=x, epsilon=epsilon), 1 / np.sqrt(wide + 0.25), dtype, 2)
    close(call("inverse", x=x, epsilon=epsilon), 1 / (wide + 0.25), dtype, 2)
    # Where the logarithm passes 0 an error of its argument's last bit counts for more.
    np.testing.assert_allclose(call("log", x=x, epsilon=epsilon), np.log(wide + 0.25), rtol=1e-3, atol=1e-6)
    close(call("inverse", x=x), 1 / (wide + float(np.array(1e-4, dtype))), dtype, 2)
    # 1e-12 is a float but rounds to 0 as a half.
    zero = np.zeros(1, dtype)
    assert call("rsqrt", x=zero)[0] == (math.inf if dtype == "float16" else np.float32(1e6))


@pytest.mark.parametrize("dtype", FLOATS)
def test_clip_and_threshold(dtype: str) -> None:
    x = np.array([-3, -1, 0, 0.5, 2, 7, math.nan], dtype)
    low, high = np.array(-1, dtype), np.array(2, dtype)
    same(call("clip", x=x, alpha=low, beta=high), np.array([-1, -1, 0, 0.5, 2, 2, math.nan], dtype))
    same(call("threshold", x=x, alpha=low), np.array([-1, -1, 0, 0.5, 2, 7, math.nan], dtype))


@pytest.mark.parametrize(
    ("source", "dtype", "expected"),
    [
        (np.array([1.9, -1.9, 0.5, -0.5, 7], np.float32), "int32", np.array([1, -1, 0, 0, 7], np.int32)),
        (np.array([1.9, -1.9], np.float16), "int16", np.array([1, -1], np.int16)),
        (np.array([70000.0, 1e-8, 2049.0, 2051.0], np.float32), "fp16", np.array([np.inf, 0, 2048, 2052], np.float16)),
        (np.array([65504.0], np.float16), "fp32", np.array([65504.0], np.float32)),
        (np.array([16777217], np.int32), "fp32", np.array([16777216.0], np.float32)),
        (np.array([0.0, -0.0, 0.1, np.nan], np.float32), "bool", np.array([False, False, True, True])),
        (np.array([True, False]), "int32", np.array([1, 0], np.int32)),
        (np.array([True, False]), "fp16", np.array([1, 0], np.float16)),
        (np.array([32768, -1, 5], np.int32), "int16", np.array([-32768, -1, 5], np.int16)),
        (np.array([65537, -1, 5], np.int32), "uint16", np.array([1, 65535, 5], np.int32)),  # its carrier is int32
        (np.array([300, -1], np.int32), "uint8", np.array([44, 255], np.uint8)),
        (np.array([200, 3], np.uint8), "int8", np.array([-56, 3], np.int8)),
        (np.array([40000, 3], np.int32), "int32", np.array([40000, 3], np.int32)),
    ],
)
def test_cast(source: np.ndarray, dtype: str, expected: np.ndarray) -> None:
    same(call("cast", x=source, dtype=dtype), expected)


def test_cast_knows_the_documented_types_only() -> None:
    with pytest.raises(ValueError, match="dtype fp64"):
        call("cast", x=np.zeros(1, np.float32), dtype="fp64")


@pytest.mark.parametrize("dtype", [*FLOATS, "int32", "bool"])
def test_select_broadcasts_all_three(dtype: str) -> None:
    cond = np.array([[True], [False], [True]])
    a, b = randoms((4,)).astype(dtype), randoms((2, 1, 1), seed=5).astype(dtype)
    expected = np.zeros((2, 3, 4), dtype)
    for i, j, k in np.ndindex(2, 3, 4):
        expected[i, j, k] = a[k] if cond[j, 0] else b[i, 0, 0]
    same(call("select", cond=cond, a=a, b=b), expected)
    same(call("select", cond=np.array(True), a=a, b=np.zeros_like(a)), a)
