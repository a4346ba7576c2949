"""Activations, normalisations, reductions, sorting and running sums against their definitions, written as loops."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from mil_operators import FLOATS, call, close, randoms, same


def sigmoid(v: float) -> float:
    return 1 / (1 + math.exp(-v))


ACTIVATIONS: dict[str, Callable[[float], float]] = {
    "relu": lambda v: max(v, 0.0), "sigmoid": sigmoid, "silu": lambda v: v * sigmoid(v),
    "softplus": lambda v: math.log(1 + math.exp(v)),
}  # fmt: skip
GELU: dict[str, Callable[[float], float]] = {
    "EXACT": lambda v: 0.5 * v * math.erfc(-v / math.sqrt(2)),
    "TANH_APPROXIMATION": lambda v: v * sigmoid(2 * math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)),
    "SIGMOID_APPROXIMATION": lambda v: v * sigmoid(1.702 * v),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str, dtype: str) -> None:
    x = np.append(randoms((300,), dtype), np.array([0, -20, 20], dtype))
    close(call(name, x=x), np.array([ACTIVATIONS[name](v) for v in x.tolist()]), dtype, 3)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mode", GELU)
def test_gelu(mode: str, dtype: str) -> None:
    x = randoms((300,), dtype)
    exact = np.array([GELU[mode](v) for v in x.tolist()])
    # 1 + erf and 1 + tanh cancel for negative arguments: float32's last bit, absolutely, is what is left.
    np.testing.assert_allclose(
        call("gelu", x=x, mode=mode), exact, rtol=1e-3 if dtype == "float16" else 1e-5, atol=2e-6
    )
    if mode == "EXACT":
        same(call("gelu", x=x), call("gelu", x=x, mode="EXACT"))
        with pytest.raises(ValueError, match="mode OTHER"):
            call("gelu", x=x, mode="OTHER")


@pytest.mark.parametrize("dtype", FLOATS)
def test_leaky_relu(dtype: str) -> None:
    x = np.array([-2, 0, 3], dtype)
    same(call("leaky_relu", x=x, alpha=0.25), np.array([-0.5, 0, 3], dtype))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_softmax(axis: int, dtype: str) -> None:
    x = randoms((3, 4, 5), dtype, scale=4)
    exact = np.zeros(x.shape)
    for place in np.ndindex(*x.shape):
        row: list[slice | int] = list(place)
        row[axis] = slice(None)
        exact[place] = math.exp(float(x[place])) / sum(math.exp(v) for v in x[tuple(row)].tolist())
    # x - max is rounded before the exponential magnifies its error by up to |x - max| = 20.
    close(call("softmax", x=x, axis=axis), exact, dtype, 1 if dtype == "float16" else 20)
    same(call("softmax", x=x), call("softmax", x=x, axis=-1))


def test_softmax_survives_large_scores() -> None:
    x = np.array([60000.0, -60000.0, 60000.0], np.float16)
    same(call("softmax", x=x), np.array([0.5, 0, 0.5], np.float16))


@pytest.mark.parametrize("dtype", FLOATS)
def test_layer_norm(dtype: str) -> None:
    x, gamma, beta = randoms((3, 4, 5), dtype), randoms((4, 5), dtype, 1), randoms((4, 5), dtype, 2)
    exact = np.zeros(x.shape)
    for i in range(3):
        row = x[i].astype(float)
        mean = row.sum() / 20
        variance = ((row - mean) ** 2).sum() / 20
        exact[i] = gamma.astype(float) * (row - mean) / math.sqrt(variance + 0.5) + beta.astype(float)
    ours = call("layer_norm", x=x, axes=(1, -1), gamma=gamma, beta=beta, epsilon=0.5)
    np.testing.assert_allclose(ours, exact, rtol=1e-3 if dtype == "float16" else 2e-6, atol=1e-6)
    assert ours.dtype == np.dtype(dtype)
    plain = call("layer_norm", x=x)
    wide = x.astype(float)
    exact = (wide - wide.mean()) / math.sqrt(wide.var() + 1e-5)
    np.testing.assert_allclose(plain, exact, rtol=1e-3 if dtype == "float16" else 2e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
def test_l2_norm(dtype: str) -> None:
    x = randoms((2, 3, 2, 2), dtype)
    exact = np.stack([row.astype(float) / math.sqrt((row.astype(float) ** 2).sum() + 0.25) for row in x])
    close(call("l2_norm", x=x, epsilon=0.25), exact, dtype, 2)
    with pytest.raises(ValueError, match="rank 2"):
        call("l2_norm", x=x[0, 0])


REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "reduce_sum": sum, "reduce_max": max, "reduce_min": min, "reduce_prod": math.prod,
    "reduce_sum_square": lambda v: sum(a * a for a in v), "reduce_l1_norm": lambda v: sum(map(abs, v)),
    "reduce_l2_norm": lambda v: math.sqrt(sum(a * a for a in v)), "reduce_mean": lambda v: sum(v) / len(v),
    "reduce_log_sum_exp": lambda v: math.log(sum(map(math.exp, v))), "reduce_log_sum": lambda v: math.log(sum(v)),
}  # fmt: skip
FLOAT_ONLY = {"reduce_l2_norm", "reduce_mean", "reduce_log_sum_exp", "reduce_log_sum"}


def reduced(function: Callable[[Sequence[float]], float], x: np.ndarray, axes: Sequence[int], keep: bool) -> np.ndarray:
    axes = [axis % x.ndim for axis in axes]
    out = np.zeros([1 if axis in axes else n for axis, n in enumerate(x.shape)])
    for place in np.ndindex(*out.shape):
        row = x[tuple(slice(None) if axis in axes else i for axis, i in enumerate(place))]
        out[place] = function(row.flatten().tolist())
    return out if keep else out.reshape([n for axis, n in enumerate(x.shape) if axis not in axes])


@pytest.mark.parametrize("dtype", [*FLOATS, "int32"])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str, dtype: str) -> None:
    x = np.round(randoms((2, 3, 4), dtype, scale=3))
    x = np.abs(x) + np.array(1, dtype) if name == "reduce_log_sum" else x
    if dtype == "int32" and name in FLOAT_ONLY:
        with pytest.raises(ValueError, match="integers"):
            call(name, x=x)
        return
    for axes, keep in (((1,), False), ((-1, 0), True), ((0, 1, 2), False)):
        exact = reduced(REDUCTIONS[name], x, axes, keep)
        ours = call(name, x=x, axes=axes, keep_dims=keep)
        if dtype == "int32":
            same(ours, exact.astype(np.int64).astype(np.int32))
        else:
            close(ours, exact, dtype, 8)  # a logarithm near 0 magnifies its argument's rounding
    same(call(name, x=x), call(name, x=x, axes=(0, 1, 2), keep_dims=False))


def test_a_float16_mean_does_not_overflow_on_its_way() -> None:
    assert call("reduce_mean", x=np.full((1, 100), 60000.0, np.float16), axes=(1,))[0] == 60000
    assert call("reduce_sum", x=np.full((1, 100), 60000.0, np.float16), axes=(1,))[0] == math.inf


def test_an_integer_sum_wraps() -> None:
    assert call("reduce_sum", x=np.full(2, 2**30, np.int32))[()] == -(2**31)


@pytest.mark.parametrize("dtype", [*FLOATS, "int32"])
def test_arg_reductions(dtype: str) -> None:
    x = np.array([[3, 1, 2], [0, 5, 4]], dtype)
    same(call("reduce_argmax", x=x), np.array([0, 1], np.int32))
    same(call("reduce_argmin", x=x, axis=0, keep_dims=True), np.array([[1, 0, 0]], np.int32))
    same(call("reduce_argmax", x=x, axis=-2, output_dtype="uint16"), np.array([0, 1, 1], np.int32))
    with pytest.raises(ValueError, match="int64"):
        call("reduce_argmax", x=x, output_dtype="int64")


@pytest.mark.parametrize("dtype", [*FLOATS, "int32"])
def test_topk_and_argsort(dtype: str) -> None:
    x = np.array([[3, 1, 2, 3], [0, 5, 4, -1]], dtype)
    values, indices = call("topk", x=x, k=3)
    same(values, np.array([[3, 3, 2], [5, 4, 0]], dtype))
    same(indices, np.array([[0, 3, 2], [1, 2, 0]], np.int32))
    values, indices = call("topk", x=x, k=1, axis=0, ascending=True)
    same(values, np.array([[0, 1, 2, -1]], dtype))
    same(indices, np.array([[1, 0, 0, 1]], np.int32))
    (values,) = call("topk", x=x, k=-1, return_indices=False)
    same(values, np.array([[3, 3, 2, 1], [5, 4, 0, -1]], dtype))
    same(call("argsort", x=x, ascending=True), np.array([[1, 2, 0, 3], [3, 0, 2, 1]], np.int32))
    same(call("argsort", x=x, axis=0), np.array([[0, 1, 1, 0], [1, 0, 0, 1]], np.int32))


@pytest.mark.parametrize("dtype", [*FLOATS, "int32"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("exclusive", [False, True])
def test_cumsum(exclusive: bool, reverse: bool, dtype: str) -> None:
    x = np.round(randoms((3, 5), dtype, scale=4))
    expected = np.zeros_like(x)
    for i, j in np.ndindex(3, 5):
        taken = [k for k in range(5) if (k >= j if reverse else k <= j) and not (exclusive and k == j)]
        expected[i, j] = sum(x[i, k] for k in taken)
    same(call("cumsum", x=x, axis=1, exclusive=exclusive, reverse=reverse), expected)
    same(call("cumsum", x=x.T, exclusive=exclusive, reverse=reverse), expected.T)
