"""Element-wise operators: arithmetic, comparison, logic, unary functions, cast and select.

Shapes broadcast as in numpy: aligned at the last axis, an axis of 1 stretches. A float16 result is the float32 result
of the float16 arguments, rounded once to nearest even; it overflows to infinity. int32 arithmetic wraps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from exporter.backends.coreml.evaluator.dtypes import BY_NAME
from exporter.backends.coreml.evaluator.operators.registry import operator, unsupported, wide

Tensor = torch.Tensor


def _arithmetic(name: str, function: Callable[[Tensor, Tensor], Tensor]) -> None:
    @operator(name)
    def kernel(x: Tensor, y: Tensor) -> Tensor:
        return function(wide(x), wide(y)).to(x.dtype)


_arithmetic("add", torch.add)
_arithmetic("sub", torch.sub)
_arithmetic("mul", torch.mul)
_arithmetic("pow", torch.pow)
# By their definitions, x > y ? x : y and x > y ? y : x: with a NaN the comparison is false.
_arithmetic("maximum", lambda x, y: torch.where(x > y, x, y))
_arithmetic("minimum", lambda x, y: torch.where(x > y, y, x))
# Rounded towards negative infinity; the remainder that goes with it has the divisor's sign.
_arithmetic("floor_div", lambda x, y: torch.div(x, y, rounding_mode="floor"))
_arithmetic("mod", torch.remainder)


@operator("real_div")
def real_div(x: Tensor, y: Tensor) -> Tensor:
    """x / y in the arguments' type. The definition gives integers no rounding, so their quotient must be whole."""
    if x.is_floating_point():
        return torch.div(wide(x), wide(y)).to(x.dtype)
    if bool((y == 0).any()) or bool((torch.remainder(x, y) != 0).any()):
        raise unsupported("integers whose quotient is not whole")
    return torch.div(x, y, rounding_mode="floor").to(x.dtype)


def _comparison(name: str, function: Callable[[Tensor, Tensor], Tensor]) -> None:
    @operator(name)
    def kernel(x: Tensor, y: Tensor) -> Tensor:
        return function(x, y)


_comparison("equal", torch.eq)
_comparison("not_equal", torch.ne)
_comparison("greater", torch.gt)
_comparison("greater_equal", torch.ge)
_comparison("less", torch.lt)
_comparison("less_equal", torch.le)
_comparison("logical_and", torch.logical_and)
_comparison("logical_or", torch.logical_or)
_comparison("logical_xor", torch.logical_xor)


@operator("logical_not")
def logical_not(x: Tensor) -> Tensor:
    return torch.logical_not(x)


def _unary(name: str, function: Callable[[Tensor], Tensor]) -> None:
    @operator(name)
    def kernel(x: Tensor) -> Tensor:
        return function(wide(x)).to(x.dtype)


for _name in ("abs", "sign", "square", "ceil", "floor", "exp", "exp2", "erf", "sqrt", "cos", "sin", "tanh"):
    _unary(_name, getattr(torch, _name))
_unary("round", torch.round)  # half to even: 0.5 becomes 0


@operator("rsqrt")
def rsqrt(x: Tensor, epsilon: Tensor | None = None) -> Tensor:
    """1 / sqrt(x + epsilon); epsilon is 1e-12 unless given, in the type of x (so 0 for float16)."""
    return torch.rsqrt(_shifted(x, epsilon, 1e-12)).to(x.dtype)


@operator("inverse")
def inverse(x: Tensor, epsilon: Tensor | None = None) -> Tensor:
    """1 / (x + epsilon); epsilon is 1e-4 unless given."""
    return torch.reciprocal(_shifted(x, epsilon, 1e-4)).to(x.dtype)


@operator("log")
def log(x: Tensor, epsilon: Tensor | None = None) -> Tensor:
    """ln(x + epsilon); epsilon is 1e-45 unless given."""
    return torch.log(_shifted(x, epsilon, 1e-45)).to(x.dtype)


def _shifted(x: Tensor, epsilon: Tensor | None, default: float) -> Tensor:
    """x + epsilon in float32."""
    return wide(x) + wide(torch.tensor(default, dtype=x.dtype) if epsilon is None else epsilon)


@operator("clip")
def clip(x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """Below alpha becomes alpha, above beta becomes beta."""
    return torch.where(x > beta, beta.to(x.dtype), torch.where(x < alpha, alpha.to(x.dtype), x))


@operator("threshold")
def threshold(x: Tensor, alpha: Tensor) -> Tensor:
    """Below alpha becomes alpha."""
    return torch.where(x < alpha, alpha.to(x.dtype), x)


@operator("cast", static=("dtype",), view=True)
def cast(x: Tensor, dtype: str) -> Tensor:
    """To another type: floats to integers towards zero, integers to fewer bits modulo 2^bits, to bool by ``x != 0``."""
    target = BY_NAME.get(dtype)
    if target is None or dtype not in ("int8", "uint8", "int16", "uint16", "int32", "fp16", "fp32", "bool"):
        raise unsupported(f"dtype {dtype}")
    if dtype == "bool":
        return x != 0
    if target.is_float or (x.dtype == target.carrier and dtype != "uint16"):
        return x.to(target.carrier)
    whole = x.to(torch.int64)
    return (whole & 0xFFFF if dtype == "uint16" else whole).to(target.carrier)


@operator("select")
def select(cond: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """a where cond, else b; the three broadcast."""
    return torch.where(cond, a, b)
