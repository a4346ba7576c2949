"""Products, attention and convolution against sums written out in float64."""

import math
from typing import Any

import numpy as np
import pytest
from mil_operators import FLOATS, call, randoms, same

# Relative to the sum of the absolute products: a float32 sum, then the rounding of the result.
TOLERANCE = {"float16": 2.0**-11, "float32": 2.0**-20}


def near(ours: np.ndarray, exact: np.ndarray, size: np.ndarray, dtype: str) -> None:
    """Within the last bit of `exact` and float32's rounding of `size`, the sum of the absolute products."""
    assert ours.dtype == np.dtype(dtype) and ours.shape == exact.shape
    allowed = np.abs(exact) * TOLERANCE[dtype] + size * 2.0**-21 + 1e-8
    assert (np.abs(ours.astype(float) - exact) <= allowed).all()


def product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """numpy's matmul rules, a pair of rows and columns at a time, in float64."""
    a = x[None] if x.ndim == 1 else x
    b = y[:, None] if y.ndim == 1 else y
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a = np.broadcast_to(a, batch + a.shape[-2:]).astype(float)
    b = np.broadcast_to(b, batch + b.shape[-2:]).astype(float)
    out = np.zeros((*batch, a.shape[-2], b.shape[-1]))
    for place in np.ndindex(*out.shape):
        *lead, i, j = place
        out[place] = sum(a[(*lead, i, k)] * b[(*lead, k, j)] for k in range(a.shape[-1]))
    if y.ndim == 1:
        out = out[..., 0]
    return out[..., 0, :] if x.ndim == 1 and y.ndim > 1 else out[..., 0] if x.ndim == 1 else out


@pytest.mark.parametrize("dtype", [*FLOATS, "int32"])
@pytest.mark.parametrize(
    ("left", "right"),
    [((3, 4), (4, 2)), ((10, 4, 3), (5, 10, 3, 2)), ((4,), (10, 4, 3)), ((10, 3, 4), (4,)), ((4,), (4,)),
     ((2, 1, 3, 4), (1, 5, 4, 2))],
)  # fmt: skip
def test_matmul(left: tuple[int, ...], right: tuple[int, ...], dtype: str) -> None:
    x, y = randoms(left, dtype), randoms(right, dtype, 1)
    exact = product(x, y)
    swapped_x = x if x.ndim == 1 else np.ascontiguousarray(np.swapaxes(x, -1, -2))
    swapped_y = y if y.ndim == 1 else np.ascontiguousarray(np.swapaxes(y, -1, -2))
    for tx, ty in ((False, False), (True, False), (False, True), (True, True)):
        ours = call("matmul", x=swapped_x if tx else x, y=swapped_y if ty else y, transpose_x=tx, transpose_y=ty)
        if dtype == "int32":
            same(ours, exact.astype(np.int32))
        else:
            near(ours, exact, product(np.abs(x), np.abs(y)), dtype)


def test_a_float16_product_adds_in_float32_and_rounds_once() -> None:
    # 2048 + 1 + 1 is 2048 when every sum is rounded to a half, and 2050 when only the last is.
    x, y = np.array([[2048, 1, 1]], np.float16), np.ones((3, 1), np.float16)
    assert call("matmul", x=x, y=y)[0, 0] == 2050
    # The bias is part of the sum: 65504 + 65504 - 65504 does not overflow on its way.
    big = np.array([[65504, 65504]], np.float16)
    assert call("linear", x=big, weight=np.ones((1, 2), np.float16), bias=np.array([-65504], np.float16))[0, 0] == 65504
    assert call("linear", x=big, weight=np.ones((1, 2), np.float16))[0, 0] == math.inf


def test_a_wide_weight_gives_the_result_of_the_half_it_stands_for() -> None:
    x, weight, bias = randoms((1, 7, 64), "float16"), randoms((5, 64), "float16", 1), randoms((5,), "float16", 2)
    narrow = call("linear", x=x, weight=weight, bias=bias)
    same(call("linear", x=x, weight=weight.astype(np.float32), bias=bias), narrow)
    same(
        call("matmul", x=x, y=weight.astype(np.float32), transpose_y=True),
        call("matmul", x=x, y=weight, transpose_y=True),
    )
    # On the left, too: the other argument says that the result is a half.
    left = call("matmul", x=weight.astype(np.float32), y=x[0], transpose_y=True)
    same(left, call("matmul", x=weight, y=x[0], transpose_y=True))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)])
def test_linear(shape: tuple[int, ...], dtype: str) -> None:
    x, weight, bias = randoms(shape, dtype), randoms((5, 4), dtype, 1), randoms((5,), dtype, 2)
    exact, size = product(x, weight.T), product(np.abs(x), np.abs(weight.T))
    near(call("linear", x=x, weight=weight), exact, size, dtype)
    near(call("linear", x=x, weight=weight, bias=bias), exact + bias, size + np.abs(bias), dtype)


def test_products_of_two_types_are_refused() -> None:
    with pytest.raises(ValueError, match="product of"):
        call("linear", x=randoms((2, 4)), weight=randoms((3, 4)).astype(np.int32))


def attended(query: Any, key: Any, value: Any, added: Any, lead: tuple[int, ...]) -> np.ndarray:
    """softmax(q k / sqrt(E) + added) v, a query at a time; `added` broadcasts, -inf takes a key out."""
    length, total = query.shape[-2], key.shape[-2]
    added = np.broadcast_to(added, (*lead, length, total))
    out = np.zeros((*lead, length, value.shape[-1]))
    for place in np.ndindex(*lead, length):
        b, i = place[:-1], place[-1]
        scores = [float(query[(*b, i)].astype(float) @ key[(*b, j)].astype(float)) / math.sqrt(query.shape[-1])
                  + float(added[(*b, i, j)]) for j in range(total)]  # fmt: skip
        weights = [math.exp(s) for s in scores]
        out[place] = sum(w * value[(*b, j)].astype(float) for j, w in enumerate(weights)) / sum(weights)
    return out


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("lead", [(2,), (2, 3)])
def test_scaled_dot_product_attention(lead: tuple[int, ...], dtype: str) -> None:
    query, key, value = (randoms((*lead, n, 4), dtype, seed, 1.0) for seed, n in enumerate((3, 5, 5)))
    value = value[..., :2].copy()
    visible = np.random.default_rng(5).random((3, 5)) < 0.6
    visible[:, 0] = True
    added = randoms((*lead[:1], *[1] * len(lead[1:]), 1, 5), dtype, 6)
    for mask, meant in ((None, 0.0), (visible, np.where(visible, 0.0, -math.inf)), (added, added.astype(float))):
        ours = call("scaled_dot_product_attention", query=query, key=key, value=value, attn_mask=mask)
        exact = attended(query, key, value, meant, lead)
        near(ours, exact, np.full(exact.shape, 8.0), dtype)


def test_attention_to_nothing_is_not_a_number() -> None:
    q = randoms((1, 2, 4))
    ours = call(
        "scaled_dot_product_attention", query=q, key=q, value=q, attn_mask=np.array([[True, False], [False] * 2])
    )
    assert np.isfinite(ours[0, 0]).all() and np.isnan(ours[0, 1]).all()


def convolved(
    x: np.ndarray, weight: np.ndarray, *, step: int = 1, before: int = 0, after: int = 0, gap: int = 1, groups: int = 1
) -> np.ndarray:
    """One axis: out[n, o, p] is the sum over c and k of weight[o, c, k] * padded[n, first + c, p * step + k * gap]."""
    batch, channels, size = x.shape
    outs, per_group, kernel = weight.shape
    padded = np.zeros((batch, channels, size + before + after))
    padded[..., before : before + size] = x
    places = (padded.shape[-1] - (kernel - 1) * gap - 1) // step + 1
    out = np.zeros((batch, outs, places))
    for n, o, p, c, k in np.ndindex(batch, outs, places, per_group, kernel):
        first = o // (outs // groups) * per_group
        out[n, o, p] += float(weight[o, c, k]) * padded[n, first + c, p * step + k * gap]
    return out


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ({}, {}),
        ({"groups": 2}, {"groups": 2}),
        ({"strides": (2,), "dilations": (2,)}, {"step": 2, "gap": 2}),
        ({"pad_type": "custom", "pad": (2, 1)}, {"before": 2, "after": 1}),
        # 6 places, stride 2, kernel 3: one zero, after or before.
        ({"pad_type": "same", "strides": (2,)}, {"step": 2, "after": 1}),
        ({"pad_type": "same_lower", "strides": (2,)}, {"step": 2, "before": 1}),
        ({"pad_type": "same"}, {"before": 1, "after": 1}),
    ],
)
def test_conv(arguments: dict[str, Any], meant: dict[str, int], dtype: str) -> None:
    groups = meant.get("groups", 1)
    x, weight, bias = randoms((2, 4, 6), dtype), randoms((6, 4 // groups, 3), dtype, 1), randoms((6,), dtype, 2)
    exact = convolved(x, weight, **meant)
    size = convolved(np.abs(x), np.abs(weight), **meant)
    near(call("conv", x=x, weight=weight, **arguments), exact, size, dtype)
    near(call("conv", x=x, weight=weight, bias=bias, **arguments), exact + bias[:, None], size + 8, dtype)
    flat = call("conv", x=x[:, :, None], weight=weight[:, :, None], pad_type=arguments.get("pad_type", "valid"),
                pad=(0, 0, *arguments["pad"]) if "pad" in arguments else None, groups=groups,
                strides=(1, meant.get("step", 1)), dilations=(1, meant.get("gap", 1)))  # fmt: skip
    near(flat[:, :, 0], exact, size, dtype)


def test_conv_refuses_an_unknown_padding() -> None:
    with pytest.raises(ValueError, match="pad_type wide"):
        call("conv", x=randoms((1, 2, 4)), weight=randoms((2, 2, 2)), pad_type="wide")


@pytest.mark.parametrize("dtype", FLOATS)
def test_einsum(dtype: str) -> None:
    x, y = randoms((2, 3, 4, 5), dtype), randoms((2, 5, 1, 6), dtype, 1)
    exact, size = np.zeros((2, 3, 4, 6)), np.zeros((2, 3, 4, 6))
    for n, c, h, u, w in np.ndindex(2, 3, 4, 6, 5):
        term = float(x[n, c, h, w]) * float(y[n, w, 0, u])
        exact[n, c, h, u] += term
        size[n, c, h, u] += abs(term)
    for equation in ("nchw,nwhu->nchu", "abcd, adce -> abce"):
        near(call("einsum", values=[x, y], equation=equation), exact, size, dtype)
    near(call("einsum", values=[x[0], y[0]], equation="chw,whr->chr"), exact[0], size[0], dtype)
    with pytest.raises(ValueError, match="equation"):
        call("einsum", values=[x[0, 0], y[0, :, 0]], equation="hw,wr->hr")
