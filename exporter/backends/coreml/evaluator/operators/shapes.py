"""Operators that move, join, split, repeat or make elements without computing with them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from exporter.backends.coreml.evaluator.operators.registry import ints, operator, unsupported

Tensor = torch.Tensor
Integers = Sequence[int] | Tensor


@operator("identity", view=True)
def identity(x: Tensor) -> Tensor:
    return x


@operator("shape")
def shape(x: Tensor) -> Tensor:
    """int32 ``[rank]``."""
    return torch.tensor(x.shape, dtype=torch.int32)


@operator("reshape", integers=("shape",), view=True)
def reshape(x: Tensor, shape: Integers) -> Tensor:
    """Elements in order under a new shape. A 0 takes the size of x's axis that is as far from the *end* (1 where x has
    none); one -1 takes what is left."""
    wanted = list(ints(shape))
    for place, size in enumerate(wanted):
        if size == 0:
            axis = x.dim() - (len(wanted) - place)
            wanted[place] = x.shape[axis] if axis >= 0 else 1
        elif size < -1:
            raise unsupported(f"shape {list(ints(shape))}")
    known = math.prod(n for n in wanted if n != -1)
    if wanted.count(-1) > 1 or (-1 in wanted and (known == 0 or x.numel() % known)):
        raise unsupported(f"shape {list(ints(shape))} for {list(x.shape)}")
    return x.reshape([x.numel() // known if n == -1 else n for n in wanted])


@operator("expand_dims", static=("axes",), view=True)
def expand_dims(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """An axis of 1 at each place of the *result* that `axes` names."""
    rank = x.dim() + len(axes)
    places = {axis % rank for axis in axes}
    if len(places) != len(axes) or not all(-rank <= axis < rank for axis in axes):
        raise unsupported(f"axes {axes} for rank {x.dim()}")
    sizes = iter(x.shape)
    return x.reshape([1 if place in places else next(sizes) for place in range(rank)])


@operator("squeeze", static=("axes",), view=True)
def squeeze(x: Tensor, axes: tuple[int, ...] | None = None) -> Tensor:
    """Without the axes of 1 that `axes` names (all of them, unless given); an axis of another size stays."""
    named = range(x.dim()) if axes is None else [axis % x.dim() for axis in axes]
    return x.reshape([n for axis, n in enumerate(x.shape) if axis not in named or n != 1])


@operator("transpose", static=("perm",), view=True)
def transpose(x: Tensor, perm: tuple[int, ...]) -> Tensor:
    """Axis i of the result is axis perm[i] of x."""
    return x.permute(perm)


@operator("reverse", static=("axes",))
def reverse(x: Tensor, axes: tuple[int, ...] | None = None) -> Tensor:
    return x.flip(tuple(range(x.dim())) if axes is None else axes)


@operator("concat", static=("axis", "interleave"))
def concat(values: Sequence[Tensor], axis: int, interleave: bool = False) -> Tensor:
    """One after the other along `axis`, or element by element in turn when `interleave`; scalars make a vector."""
    parts = [value.reshape(1) if value.dim() == 0 else value for value in values]
    if not interleave:
        return torch.cat(parts, axis)
    if len({part.shape for part in parts}) != 1:
        raise unsupported("interleaving tensors of different shapes")
    axis %= parts[0].dim()
    return torch.stack(parts, axis + 1).flatten(axis, axis + 1)


@operator("stack", static=("axis",))
def stack(values: Sequence[Tensor], axis: int) -> Tensor:
    return torch.stack(tuple(values), axis)


@operator("split", static=("axis", "num_splits", "split_sizes"), view=True)
def split(
    x: Tensor, axis: int, num_splits: int | None = None, split_sizes: tuple[int, ...] | None = None
) -> tuple[Tensor, ...]:
    """Into `split_sizes`, or into `num_splits` equal parts."""
    size = x.shape[axis]
    if split_sizes is None:
        if num_splits is None or size % num_splits:
            raise unsupported(f"{num_splits} equal parts of {size}")
        split_sizes = (size // num_splits,) * num_splits
    if sum(split_sizes) != size or num_splits not in (None, len(split_sizes)):
        raise unsupported(f"parts {split_sizes} of {size}")
    return torch.split(x, list(split_sizes), axis)


@operator("tile", integers=("reps",))
def tile(x: Tensor, reps: Integers) -> Tensor:
    """reps[i] copies along axis i."""
    counts = ints(reps)
    if len(counts) != x.dim() or min(counts, default=1) < 1:
        raise unsupported(f"reps {list(counts)} for rank {x.dim()}")
    return x.repeat(counts) if x.dim() else x.clone()


@operator("fill", integers=("shape",))
def fill(shape: Integers, value: Tensor | None = None) -> Tensor:
    """`value` (0.0 unless given) in every place, in its own type."""
    return torch.zeros(ints(shape)) if value is None else value.expand(ints(shape)).clone()


@operator("fill_like")
def fill_like(ref_tensor: Tensor, value: Tensor | None = None) -> Tensor:
    """`fill` with the shape of `ref_tensor`."""
    return fill(tuple(ref_tensor.shape), value)


@operator("range_1d")
def range_1d(start: Tensor, end: Tensor, step: Tensor) -> Tensor:
    """start, start + step, ... short of end, in the type of start."""
    first, last, stride = (value.item() for value in (start, end, step))
    if stride == 0:
        raise unsupported("step 0")
    count = max(0, math.ceil((last - first) / stride))
    steps = torch.arange(count, dtype=torch.float32 if start.is_floating_point() else torch.int64)
    return (steps * stride + first).to(start.dtype)


@operator("one_hot", static=("one_hot_vector_size", "axis"))
def one_hot(
    indices: Tensor, one_hot_vector_size: int, axis: int = -1, on_value: Tensor | None = None,
    off_value: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """A new axis of that size, on_value (int32 1 unless given) at the index and off_value (0) elsewhere."""
    axis %= indices.dim() + 1
    places = [1] * (indices.dim() + 1)
    places[axis] = one_hot_vector_size
    hit = indices.unsqueeze(axis) == torch.arange(one_hot_vector_size, dtype=indices.dtype).view(places)
    on = torch.tensor(1, dtype=torch.int32) if on_value is None else on_value
    return torch.where(hit, on, torch.zeros_like(on) if off_value is None else off_value)


@operator("non_zero")
def non_zero(x: Tensor) -> Tensor:
    """Indices of the elements that are not 0, int32 ``[count, rank]``, in row-major order."""
    return torch.nonzero(x).to(torch.int32)


@operator("band_part", static=("lower", "upper"))
def band_part(x: Tensor, lower: int = -1, upper: int = -1) -> Tensor:
    """Zero outside the band of `lower` diagonals below and `upper` above the main one; negative keeps the side."""
    rows, columns = torch.arange(x.shape[-2])[:, None], torch.arange(x.shape[-1])[None, :]
    inside = torch.ones(x.shape[-2:], dtype=torch.bool)
    if lower >= 0:
        inside &= rows - columns <= lower
    if upper >= 0:
        inside &= columns - rows <= upper
    return torch.where(inside, x, torch.zeros_like(x))


@operator("pad", integers=("pad",), static=("mode",))
def pad(x: Tensor, pad: Integers, mode: str = "constant", constant_val: Tensor | None = None) -> Tensor:
    """Before and after each of the last ``len(pad) / 2`` axes: a constant, the mirror image, or the outermost row."""
    amounts = ints(pad)
    first = x.dim() - len(amounts) // 2
    for place in range(len(amounts) // 2):
        axis, before, after = first + place, amounts[2 * place], amounts[2 * place + 1]
        size = x.shape[axis]
        index = torch.arange(-before, size + after)
        if mode == "reflect":
            if max(before, after) > size - 1:
                raise unsupported(f"a reflection of {max(before, after)} rows of {size}")
            index = (size - 1) - (index.abs() - (size - 1)).abs()
        elif mode not in ("replicate", "constant"):
            raise unsupported(f"mode {mode}")
        padded = x.index_select(axis, index.clamp(0, size - 1))
        if mode == "constant":
            view = [1] * x.dim()
            view[axis] = -1
            value = torch.zeros((), dtype=x.dtype) if constant_val is None else constant_val.to(x.dtype)
            padded = torch.where(((index >= 0) & (index < size)).view(view), padded, value)
        x = padded
    return x if amounts else x.clone()
