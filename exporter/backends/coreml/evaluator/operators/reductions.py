"""Reductions, sorting and running sums.

A float16 reduction adds in float32 and rounds once. An integer sum wraps in its own type.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from exporter.backends.coreml.evaluator.dtypes import BY_NAME
from exporter.backends.coreml.evaluator.operators.registry import operator, unsupported, wide

Tensor = torch.Tensor
Axes = tuple[int, ...]


def _reduction(name: str, function: Callable[[Tensor, Axes, bool], Tensor], *, integers: bool = True) -> None:
    @operator(name, static=("axes", "keep_dims"))
    def kernel(x: Tensor, axes: Axes | None = None, keep_dims: bool = False) -> Tensor:
        if not integers and not x.is_floating_point():
            raise unsupported("integers, whose result the definition does not give a type that can hold it")
        over = tuple(range(x.dim())) if axes is None else axes
        return function(wide(x), over, keep_dims).to(x.dtype)


def _product(x: Tensor, axes: Axes, keep: bool) -> Tensor:
    for axis in sorted((a % x.dim() for a in axes), reverse=True):
        x = torch.prod(x, axis, keepdim=keep)
    return x


_reduction("reduce_sum", lambda x, axes, keep: x.sum(axes, keepdim=keep))
_reduction("reduce_sum_square", lambda x, axes, keep: (x * x).sum(axes, keepdim=keep))
_reduction("reduce_l1_norm", lambda x, axes, keep: x.abs().sum(axes, keepdim=keep))
_reduction("reduce_max", lambda x, axes, keep: x.amax(axes, keepdim=keep))
_reduction("reduce_min", lambda x, axes, keep: x.amin(axes, keepdim=keep))
_reduction("reduce_prod", _product)
_reduction("reduce_mean", lambda x, axes, keep: x.mean(axes, keepdim=keep), integers=False)
_reduction("reduce_l2_norm", lambda x, axes, keep: (x * x).sum(axes, keepdim=keep).sqrt(), integers=False)
_reduction("reduce_log_sum", lambda x, axes, keep: x.sum(axes, keepdim=keep).log(), integers=False)
_reduction("reduce_log_sum_exp", lambda x, axes, keep: x.logsumexp(axes, keepdim=keep), integers=False)


def _arg(name: str, function: Callable[..., Tensor]) -> None:
    @operator(name, static=("axis", "keep_dims", "output_dtype"))
    def kernel(x: Tensor, axis: int = -1, keep_dims: bool = False, output_dtype: str = "int32") -> Tensor:
        return function(x, axis, keepdim=keep_dims).to(_index_type(output_dtype))


_arg("reduce_argmax", torch.argmax)
_arg("reduce_argmin", torch.argmin)


def _index_type(name: str) -> torch.dtype:
    if name not in ("int32", "uint16"):
        raise unsupported(f"indices of type {name}")
    return BY_NAME[name].carrier


@operator("argsort", static=("axis", "ascending"))
def argsort(x: Tensor, axis: int = -1, ascending: bool = False) -> Tensor:
    """Indices that sort along `axis`, int32; equal values keep their order."""
    return torch.argsort(x, dim=axis, descending=not ascending, stable=True).to(torch.int32)


@operator("topk", static=("k", "axis", "ascending", "sort", "return_indices", "output_indices_dtype"))
def topk(
    x: Tensor, *, k: int = 1, axis: int = -1, ascending: bool = False, sort: bool = True, return_indices: bool = True,
    output_indices_dtype: str = "int32",
) -> tuple[Tensor, ...]:  # fmt: skip
    """The k largest (smallest when `ascending`) along `axis`, sorted, and their indices; k of -1 takes all."""
    order = torch.argsort(x, dim=axis, descending=not ascending, stable=True)
    order = order.narrow(axis, 0, x.shape[axis] if k == -1 else k)
    values = torch.gather(x, axis, order)
    return (values, order.to(_index_type(output_indices_dtype))) if return_indices else (values,)


@operator("cumsum", static=("axis", "exclusive", "reverse"))
def cumsum(x: Tensor, axis: int = 0, exclusive: bool = False, reverse: bool = False) -> Tensor:
    """Running sum along `axis`; `exclusive` leaves the element itself out, `reverse` starts at the end."""
    z = wide(x).flip(axis) if reverse else wide(x)
    sums = torch.cumsum(z, axis, dtype=z.dtype)
    if exclusive:
        first = torch.zeros_like(sums.narrow(axis, 0, 1))
        sums = torch.cat([first, sums.narrow(axis, 0, sums.shape[axis] - 1)], axis)
    return (sums.flip(axis) if reverse else sums).to(x.dtype)
