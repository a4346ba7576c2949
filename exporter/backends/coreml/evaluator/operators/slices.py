"""Slices and gathers: reading, and replacing, a part of a tensor.

**Slices** are numpy's: a negative begin or end counts from the end, what reaches past the end stops there, an axis of
`squeeze_mask` is indexed and disappears.

**Gathers** follow iOS 17 and later: an index is non-negative and below the axis' size. What another index gives is
undefined (unless `validate_indices`, which asks for an error); a program that relies on it is refused here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from exporter.backends.coreml.evaluator.operators.registry import ints, operator, unsupported

Tensor = torch.Tensor
Integers = Sequence[int] | Tensor
Mask = tuple[bool, ...] | None


def _ranges(
    sizes: Sequence[int], begin: Integers, end: Integers, *, stride: Integers | None, begin_mask: Mask,
    end_mask: Mask, squeeze_mask: Mask,
) -> list[range | int]:  # fmt: skip
    """For each axis the indices taken, or the one index of a squeezed axis."""
    rank = len(sizes)
    begins, ends = ints(begin), ints(end)
    strides = (1,) * rank if stride is None else ints(stride)
    if not len(begins) == len(ends) == len(strides) == rank:
        raise unsupported(f"a slice of {len(begins)} axes for rank {rank}")
    taken: list[range | int] = []
    for axis, size in enumerate(sizes):
        if squeeze_mask is not None and squeeze_mask[axis]:
            index = 0 if begin_mask is not None and begin_mask[axis] else begins[axis]
            if not -size <= index < size:
                raise unsupported(f"index {index} of an axis of {size}")
            taken.append(index % size)
            continue
        if strides[axis] == 0:
            raise unsupported("stride 0")
        first = None if begin_mask is not None and begin_mask[axis] else begins[axis]
        last = None if end_mask is not None and end_mask[axis] else ends[axis]
        taken.append(range(*slice(first, last, strides[axis]).indices(size)))
    return taken


def _view(x: Tensor, taken: Sequence[range | int]) -> tuple[Tensor, list[int]]:
    """A view of what is taken, and the axes of the view that must still be reversed (torch has no negative stride)."""
    reversed_axes = []
    axis = 0
    for part in taken:
        if isinstance(part, int):
            x = x.select(axis, part)
            continue
        if len(part) == 0:
            x = x.narrow(axis, 0, 0)
        elif part.step > 0:
            x = x.narrow(axis, part.start, part[-1] - part.start + 1)
            x = x if part.step == 1 else _every(x, axis, part.step)
        else:
            x = _every(x.narrow(axis, part[-1], part.start - part[-1] + 1), axis, -part.step)
            reversed_axes.append(axis)
        axis += 1
    return x, reversed_axes


def _every(x: Tensor, axis: int, step: int) -> Tensor:
    index: list[slice] = [slice(None)] * x.dim()
    index[axis] = slice(None, None, step)
    return x[tuple(index)]


@operator(
    "slice_by_index", integers=("begin", "end", "stride"), static=("begin_mask", "end_mask", "squeeze_mask"), view=True
)
def slice_by_index(
    x: Tensor, begin: Integers, end: Integers, *, stride: Integers | None = None, begin_mask: Mask = None,
    end_mask: Mask = None, squeeze_mask: Mask = None,
) -> Tensor:  # fmt: skip
    """``x[begin[0]:end[0]:stride[0], ...]``; a mask replaces a bound by the natural one."""
    masks = {"begin_mask": begin_mask, "end_mask": end_mask, "squeeze_mask": squeeze_mask}
    part, backwards = _view(x, _ranges(x.shape, begin, end, stride=stride, **masks))
    return part.flip(backwards) if backwards else part


@operator(
    "slice_update", integers=("begin", "end", "stride"), static=("begin_mask", "end_mask", "squeeze_mask", "in_place"),
    view=True,
)  # fmt: skip
def slice_update(
    x: Tensor, update: Tensor, begin: Integers, end: Integers, *, stride: Integers | None = None,
    begin_mask: Mask = None, end_mask: Mask = None, squeeze_mask: Mask = None, in_place: bool = False,
) -> Tensor:  # fmt: skip
    """x with the slice replaced by `update`, which must have the slice's shape.

    `in_place` is no input of the operator: `states` sets it where x is a state that nobody reads again.
    """
    result = x if in_place else x.clone()
    masks = {"begin_mask": begin_mask, "end_mask": end_mask, "squeeze_mask": squeeze_mask}
    part, backwards = _view(result, _ranges(x.shape, begin, end, stride=stride, **masks))
    if part.shape != update.shape:
        raise unsupported(f"an update {list(update.shape)} of a slice {list(part.shape)}")
    part.copy_(update.flip(backwards) if backwards else update)
    return result


@operator("slice_by_size", integers=("begin", "size"), view=True)
def slice_by_size(x: Tensor, begin: Integers, size: Integers) -> Tensor:
    """size[i] elements from begin[i] on; -1 takes all that remain."""
    for axis, (first, count) in enumerate(zip(ints(begin), ints(size), strict=True)):
        whole = x.shape[axis]
        start = first + whole if first < 0 else first
        length = whole - start if count == -1 else count
        if start < 0 or length < 0 or start + length > whole:
            raise unsupported(f"{count} elements from {first} of an axis of {whole}")
        x = x.narrow(axis, start, length)
    return x


def _checked(indices: Tensor, size: int) -> Tensor:
    """int64 indices, each of ``0 .. size - 1``."""
    if indices.numel():
        low, high = int(indices.min()), int(indices.max())
        if low < 0 or high >= size:
            raise unsupported(
                f"index {low if low < 0 else high} of an axis of {size}, which this opset leaves undefined"
            )
    return indices.to(torch.int64)


@operator("gather", static=("axis", "batch_dims", "validate_indices"))
def gather(x: Tensor, indices: Tensor, axis: int = 0, batch_dims: int = 0, validate_indices: bool = False) -> Tensor:
    """x's slices at `indices` along `axis`; the first `batch_dims` axes of both run together.

    x ``[*B, *P, D, *R]``, indices ``[*B, *N]`` to ``[*B, *P, *N, *R]``.
    """
    axis %= x.dim()
    if not 0 <= batch_dims <= min(axis, indices.dim()):
        raise unsupported(f"batch_dims {batch_dims} with axis {axis}")
    at = _checked(indices, x.shape[axis])
    batch, picked = x.shape[:batch_dims], at.shape[batch_dims:]
    if batch != at.shape[:batch_dims]:
        raise unsupported(f"indices {list(at.shape)} for {list(x.shape)} with batch_dims {batch_dims}")
    flat = at.reshape((*batch, -1))
    if batch_dims == 0:
        taken = x.index_select(axis, flat)
    else:
        index = flat.view(*batch, *[1] * (axis - batch_dims), -1, *[1] * (x.dim() - axis - 1))
        sizes = [*x.shape[:axis], flat.shape[-1], *x.shape[axis + 1 :]]
        taken = torch.gather(x, axis, index.expand(sizes))
    return taken.reshape((*x.shape[:axis], *picked, *x.shape[axis + 1 :]))


@operator("gather_along_axis", static=("axis", "validate_indices"))
def gather_along_axis(x: Tensor, indices: Tensor, axis: int = 0, validate_indices: bool = False) -> Tensor:
    """Element of x at the same place but `indices` along `axis`; the result has the shape of `indices`."""
    axis %= x.dim()
    sizes = [n for place, n in enumerate(x.shape) if place != axis]
    if [n for place, n in enumerate(indices.shape) if place != axis] != sizes:
        raise unsupported(f"indices {list(indices.shape)} for {list(x.shape)} along axis {axis}")
    return torch.gather(x, axis, _checked(indices, x.shape[axis]))


@operator("gather_nd", static=("batch_dims", "validate_indices"))
def gather_nd(x: Tensor, indices: Tensor, batch_dims: int = 0, validate_indices: bool = False) -> Tensor:
    """x at the coordinates in the last axis of `indices`, axes `batch_dims` and on.

    x ``[*B, *D, *R]``, indices ``[*B, *N, len(D)]`` to ``[*B, *N, *R]``.
    """
    depth = indices.shape[-1]
    batch = x.shape[:batch_dims]
    if batch != indices.shape[:batch_dims] or batch_dims + depth > x.dim():
        raise unsupported(f"indices {list(indices.shape)} for {list(x.shape)} with batch_dims {batch_dims}")
    between = indices.shape[batch_dims:-1]
    places = [
        torch.arange(size).view(*[size if i == place else 1 for i in range(batch_dims)], *[1] * len(between))
        for place, size in enumerate(batch)
    ]
    coordinates = [_checked(indices[..., i], x.shape[batch_dims + i]) for i in range(depth)]
    return x[tuple([*places, *coordinates])] if places or coordinates else x.clone()
