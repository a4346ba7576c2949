"""``constexpr_*``: constants that are stored compressed. They are unpacked once, at load.

Each takes its inputs by name (tensors in their carriers, strings) and returns the dense tensor of the declared type, or
float32 with the same values when a wide weight is wanted. A block of rows at a time, so that beside the result only a
few megabytes are in use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

Tensor = torch.Tensor
Inputs = Mapping[str, Any]
Unpack = Callable[[Inputs, torch.dtype, bool], Tensor]
CONSTEXPR: dict[str, Unpack] = {}

BLOCK_ELEMENTS = 1 << 22


def _constexpr(name: str) -> Callable[[Unpack], Unpack]:
    def declare(function: Unpack) -> Unpack:
        CONSTEXPR[name] = function
        return function

    return declare


def _by_rows(shape: torch.Size, dtype: torch.dtype, wide: bool, rows_of: Callable[[int, int], Tensor]) -> Tensor:
    """Fill a tensor from `rows_of(first, last)`, rounding each block to `dtype` before it may become float32."""
    out = torch.empty(shape, dtype=torch.float32 if wide and dtype == torch.float16 else dtype)
    step = max(1, BLOCK_ELEMENTS // max(1, out[0].numel()))
    for first in range(0, shape[0], step):
        last = min(first + step, shape[0])
        out[first:last] = rows_of(first, last).to(dtype)
    return out


def _stretched(blocks: Tensor, shape: torch.Size, first: int, last: int) -> Tensor:
    """Rows first .. last - 1 of `blocks` with every entry repeated to cover its block of `shape`."""
    height = shape[0] // blocks.shape[0]
    blocks = blocks.index_select(0, torch.arange(first, last) // height)
    for axis in range(1, blocks.dim()):
        blocks = blocks.repeat_interleave(shape[axis] // blocks.shape[axis], axis)
    return blocks


@_constexpr("constexpr_blockwise_shift_scale")
def blockwise_shift_scale(inputs: Inputs, dtype: torch.dtype, wide: bool) -> Tensor:
    """scale * (data - offset): an entry of scale and offset covers a block of data, whose size along each axis is
    the ratio of theirs. In float32, rounded once."""
    data, scale, offset = inputs["data"], inputs["scale"], inputs.get("offset")

    def rows_of(first: int, last: int) -> Tensor:
        block = data[first:last].float()
        if offset is not None:
            block = block - _stretched(offset, data.shape, first, last).float()
        return _stretched(scale, data.shape, first, last).float() * block

    return _by_rows(data.shape, dtype, wide, rows_of)


@_constexpr("constexpr_lut_to_dense")
def lut_to_dense(inputs: Inputs, dtype: torch.dtype, wide: bool) -> Tensor:
    """Each index replaced by its entry of the lookup table that covers its block.

    indices ``[*D]``, lut ``[*G, 2^bits, V]`` with G dividing D; V > 1 puts an entry's V numbers one after the other
    along `vector_axis`.
    """
    indices, lut = inputs["indices"], inputs["lut"]
    entries, vector = lut.shape[-2:]
    tables = lut.reshape(-1, vector)  # all tables below each other
    number = torch.arange(lut.numel() // (entries * vector)).view(lut.shape[:-2]) * entries

    def rows_of(first: int, last: int) -> Tensor:
        place = _stretched(number, indices.shape, first, last) + indices[first:last].to(torch.int64)
        found = tables.index_select(0, place.flatten()).view(*place.shape, vector)
        if vector == 1:
            return found.squeeze(-1)
        axis = int(inputs["vector_axis"]) % indices.dim()
        return found.movedim(-1, axis + 1).flatten(axis, axis + 1)

    if vector == 1:
        return _by_rows(indices.shape, dtype, wide, rows_of)
    whole = rows_of(0, indices.shape[0]).to(dtype)
    return whole.float() if wide and dtype == torch.float16 else whole


@_constexpr("constexpr_affine_dequantize")
def affine_dequantize(inputs: Inputs, dtype: torch.dtype, wide: bool) -> Tensor:
    """scale * (quantized_data - zero_point), scale and zero point a scalar or a vector along `axis`."""
    data, axis = inputs["quantized_data"], int(inputs["axis"])

    def along(vector: Tensor, first: int, last: int) -> Tensor:
        if vector.dim() == 0 or vector.numel() == 1:
            return vector.float().reshape(())
        view = [1] * data.dim()
        view[axis] = -1
        return (vector.float()[first:last] if axis % data.dim() == 0 else vector.float()).view(view)

    def rows_of(first: int, last: int) -> Tensor:
        zero = along(inputs["zero_point"], first, last)
        return along(inputs["scale"], first, last) * (data[first:last].float() - zero)

    return _by_rows(data.shape, dtype, wide, rows_of)


@_constexpr("constexpr_cast")
def cast(inputs: Inputs, dtype: torch.dtype, wide: bool) -> Tensor:
    """The source in the output's type."""
    source: Tensor = inputs["source_val"]
    return source.to(dtype)
