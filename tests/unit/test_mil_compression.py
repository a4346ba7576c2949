"""Packed element types and compressed constants, against loops over bits and places."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from exporter.backends.coreml.evaluator.dtypes import BY_NAME, decode, storage_bytes
from exporter.backends.coreml.evaluator.operators import CONSTEXPR, OPERATORS, compression

DTYPES = {"float16": torch.float16, "float32": torch.float32}


def packed(codes: list[int], bits: int) -> bytes:
    """Codes bit by bit, each byte filled from its least significant bit upward."""
    out = bytearray((len(codes) * bits + 7) // 8)
    for number, code in enumerate(codes):
        for bit in range(bits):
            place = number * bits + bit
            out[place // 8] |= (code >> bit & 1) << place % 8
    return bytes(out)


@pytest.mark.parametrize("name", ["uint1", "uint2", "uint3", "uint4", "uint6", "int4"])
@pytest.mark.parametrize("count", [0, 1, 3, 8, 37])
def test_packed_types(name: str, count: int) -> None:
    element = BY_NAME[name]
    codes = np.random.default_rng(count).integers(0, 2**element.bits, count).tolist()
    raw = packed(codes, element.bits)
    assert len(raw) == storage_bytes(element, count)
    signed = [code - 16 if name == "int4" and code >= 8 else code for code in codes]
    assert decode(raw, element, count).tolist() == signed


def test_the_documented_example_of_packing() -> None:
    # Indices of 2 bits, i0 in the lowest bits of byte 0, i4 in the lowest of byte 1.
    assert decode(bytes([0b01_10_11_00, 0b000000_11]), BY_NAME["uint2"], 5).tolist() == [0, 3, 2, 1, 3]


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("fp16", np.array([1.5, -2, np.inf], np.float16)),
        ("fp32", np.array([1.5, -2, 1e-40], np.float32)),
        ("int8", np.array([-128, 127], np.int8)),
        ("uint8", np.array([0, 255], np.uint8)),
        ("int16", np.array([-32768, 3], np.int16)),
        ("uint16", np.array([65535, 3], np.uint16)),
        ("int32", np.array([-(2**31), 3], np.int32)),
        ("uint32", np.array([2**32 - 1, 3], np.uint32)),
        ("int64", np.array([-(2**63), 3], np.int64)),
    ],
)
def test_whole_types(name: str, array: np.ndarray) -> None:
    tensor = decode(array.tobytes(), BY_NAME[name], len(array))
    assert tensor.dtype == BY_NAME[name].carrier
    assert tensor.tolist() == array.tolist()


def unpacked(name: str, dtype: str, wide: bool, monkeypatch: pytest.MonkeyPatch, **inputs: Any) -> np.ndarray:
    """The result whole, and the same when it is made a row or two at a time."""
    tensors = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in inputs.items()}
    whole = CONSTEXPR[name](tensors, DTYPES[dtype], wide)
    monkeypatch.setattr(compression, "BLOCK_ELEMENTS", 2 * whole[0].numel())
    assert torch.equal(whole, CONSTEXPR[name](tensors, DTYPES[dtype], wide))
    expected = torch.float32 if wide else DTYPES[dtype]
    assert whole.dtype == expected
    return whole.numpy()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    ("shape", "blocks"), [((6, 8), (6, 1)), ((6, 8), (6, 4)), ((6, 8), (3, 2)), ((4, 2, 3), (1, 2, 1))]
)
@pytest.mark.parametrize("shifted", [False, True])
def test_blockwise_shift_scale(
    shape: tuple[int, ...], blocks: tuple[int, ...], *, shifted: bool, wide: bool, dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    generator = np.random.default_rng(0)
    data = generator.integers(-8, 8, shape).astype(np.int8)
    scale = generator.random(blocks).astype(dtype)
    offset = generator.integers(-3, 4, blocks).astype(np.int8) if shifted else None
    expected = np.zeros(shape, dtype)
    for place in np.ndindex(*shape):
        block = tuple(i // (n // m) for i, n, m in zip(place, shape, blocks, strict=True))
        shift = 0 if offset is None else int(offset[block])
        expected[place] = float(scale[block]) * (int(data[place]) - shift)
    inputs = {"data": data, "scale": scale} | ({} if offset is None else {"offset": offset})
    ours = unpacked("constexpr_blockwise_shift_scale", dtype, wide, monkeypatch, **inputs)
    np.testing.assert_array_equal(ours.astype(dtype), expected)
    np.testing.assert_array_equal(ours, expected.astype(ours.dtype))  # a wide weight is a half in a float's clothes


def test_the_documented_example_of_grouped_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    indices = np.array([2, 3, 3, 0, 1, 0, 3, 0, 2, 1, 0, 3], np.uint8).reshape(6, 2)
    lut = np.array([1, 5, 9, 13, 2, 10, 18, 26], np.float16).reshape(2, 1, 4, 1)
    ours = unpacked("constexpr_lut_to_dense", "float16", False, monkeypatch, indices=indices, lut=lut)
    assert ours.tolist() == [[9, 13], [13, 1], [5, 1], [26, 2], [18, 10], [2, 26]]


@pytest.mark.parametrize("axis", [1, 2, -1])
def test_the_documented_example_of_vector_lookup(axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    indices = np.array([[[0, 0], [1, 0]], [[1, 1], [0, 0]]], np.uint8)
    a0, a1, a2, b0, b1, b2 = range(1, 7)
    lut = np.array([[a0, a1, a2], [b0, b1, b2]], np.float32).reshape(1, 1, 1, 2, 3)
    ours = unpacked("constexpr_lut_to_dense", "float32", False, monkeypatch, indices=indices, lut=lut, vector_axis=axis)
    if axis == 1:
        expected = [[[a0, a0], [a1, a1], [a2, a2], [b0, a0], [b1, a1], [b2, a2]],
                    [[b0, b0], [b1, b1], [b2, b2], [a0, a0], [a1, a1], [a2, a2]]]  # fmt: skip
    else:
        expected = [[[a0, a1, a2, a0, a1, a2], [b0, b1, b2, a0, a1, a2]],
                    [[b0, b1, b2, b0, b1, b2], [a0, a1, a2, a0, a1, a2]]]  # fmt: skip
    assert ours.tolist() == expected


@pytest.mark.parametrize("wide", [False, True])
def test_lookup_by_blocks_of_both_axes(wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(1)
    indices = generator.integers(0, 16, (6, 8)).astype(np.uint8)
    lut = generator.standard_normal((3, 2, 16, 1)).astype(np.float16)
    expected = np.zeros((6, 8), np.float16)
    for i, j in np.ndindex(6, 8):
        expected[i, j] = lut[i // 2, j // 4, indices[i, j], 0]
    ours = unpacked("constexpr_lut_to_dense", "float16", wide, monkeypatch, indices=indices, lut=lut)
    np.testing.assert_array_equal(ours.astype(np.float16), expected)


@pytest.mark.parametrize(("axis", "vector"), [(0, True), (1, True), (-1, True), (0, False)])
def test_affine_dequantize(axis: int, vector: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(2)
    data = generator.integers(0, 256, (4, 6)).astype(np.uint8)
    size = data.shape[axis] if vector else 1
    scale, zero = generator.random(size).astype(np.float16), generator.integers(0, 256, size).astype(np.uint8)
    expected = np.zeros(data.shape, np.float16)
    for place in np.ndindex(*data.shape):
        at = place[axis] if vector else 0
        expected[place] = float(scale[at]) * (int(data[place]) - int(zero[at]))
    inputs = {"quantized_data": data, "scale": scale, "zero_point": zero, "axis": torch.tensor(axis)}
    if not vector:
        inputs |= {"scale": scale.reshape(()), "zero_point": zero.reshape(())}
    ours = unpacked("constexpr_affine_dequantize", "float16", False, monkeypatch, **inputs)
    np.testing.assert_array_equal(ours, expected)


def test_cast_of_a_constant() -> None:
    source = torch.tensor([1.5, math.inf], dtype=torch.float16)
    assert torch.equal(CONSTEXPR["constexpr_cast"]({"source_val": source}, torch.float32, False), source.float())


def test_the_page_lists_every_operator() -> None:
    page = (Path(__file__).parents[2] / "docs" / "mlpackage-evaluator.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`(\w+)`", page.split("## Operators")[1]))
    assert listed == {*OPERATORS, *CONSTEXPR, "const", "read_state", "write_state", "coreml_update_state"}
