"""Write `.mlpackage` folders by hand, byte by byte: reader and writer share nothing but the protobuf classes.

A builder makes one package. Values are named by their strings; a constant is written where it is used, in the weight
file when its `Blob` says so.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from exporter.backends.coreml.evaluator.protobuf import messages

TYPE_NUMBERS = {
    "bool": 1, "string": 2, "fp16": 10, "fp32": 11, "int8": 21, "int16": 22, "int32": 23, "int4": 25, "uint8": 31,
    "uint16": 32, "uint4": 35, "uint2": 36, "uint1": 37, "uint6": 38, "uint3": 39,
}  # fmt: skip
BLOB_NUMBERS = {"fp16": 1, "fp32": 2, "uint8": 3, "int8": 4, "int4": 8, "uint4": 11, "uint3": 12, "int32": 14}
BITS = {"int4": 4, "uint4": 4, "uint3": 3}
NUMPY = {"fp16": "float16", "fp32": "float32", "bool": "bool"}
Dims = Sequence[int | None]


@dataclass
class Blob:
    """A constant that is kept in the weight file."""

    array: np.ndarray
    dtype: str


@dataclass
class Typed:
    """A constant of a type that numpy's own does not name, spelled out in the program."""

    array: np.ndarray
    dtype: str


def mil_name(array: np.ndarray) -> str:
    return {"float16": "fp16", "float32": "fp32", "int64": "int32"}.get(array.dtype.name, array.dtype.name)


def pack(array: np.ndarray, dtype: str) -> bytes:
    """Little-endian bytes; types below a byte from the least significant bit upward."""
    if dtype not in BITS:
        return array.astype(NUMPY.get(dtype, dtype)).tobytes()
    bits = BITS[dtype]
    whole = 0
    for place, code in enumerate(array.flatten().tolist()):
        whole |= (code & (2**bits - 1)) << place * bits
    return whole.to_bytes((array.size * bits + 7) // 8, "little")


class Builder:
    """One package. `opset` is written for every function."""

    def __init__(self, opset: str = "CoreML8") -> None:
        self.model = messages().Model()  # type: ignore[attr-defined]
        self.model.specificationVersion = 9
        self.model.mlProgram.version = 1
        self.opset = opset
        self.blobs: list[Blob] = []
        self.offsets: dict[int, int] = {}

    def function(self, name: str = "main") -> FunctionBuilder:
        return FunctionBuilder(self, name)

    def blob_offset(self, blob: Blob) -> int:
        """Where the metadata of `blob` will be; the same object is stored once."""
        if id(blob) not in self.offsets:
            self.blobs.append(blob)
            self.offsets[id(blob)] = self.layout()[-1][0]
        return self.offsets[id(blob)]

    def layout(self) -> list[tuple[int, int, bytes]]:
        """Offsets of metadata and data, and the data, of every blob."""
        at, rows = 64, []
        for blob in self.blobs:
            data = pack(blob.array, blob.dtype)
            rows.append((at, at + 64, data))
            at = (at + 64 + len(data) + 63) // 64 * 64
        return rows

    def weight_file(self) -> bytes:
        out = bytearray(struct.pack("<II", len(self.blobs), 2).ljust(64, b"\0"))
        for blob, (meta, start, data) in zip(self.blobs, self.layout(), strict=True):
            out = out.ljust(meta, b"\0")
            padding = len(data) * 8 - blob.array.size * BITS.get(blob.dtype, len(data) * 8 // max(1, blob.array.size))
            row = struct.pack("<IIQQQ", 0xDEADBEEF, BLOB_NUMBERS[blob.dtype], len(data), start, padding)
            out += row.ljust(64, b"\0") + data
        return bytes(out)

    def save(self, path: Path) -> Path:
        folder = path / "Data" / "com.apple.CoreML"
        (folder / "weights").mkdir(parents=True)
        (folder / "model.mlmodel").write_bytes(self.model.SerializeToString())
        (folder / "weights" / "weight.bin").write_bytes(self.weight_file())
        items = {"A": "com.apple.CoreML/model.mlmodel", "B": "com.apple.CoreML/weights"}
        manifest = {
            "fileFormatVersion": "1.0.0",
            "itemInfoEntries": {k: {"author": "com.apple.CoreML", "path": v} for k, v in items.items()},
            "rootModelIdentifier": "A",
        }
        (path / "Manifest.json").write_text(json.dumps(manifest))
        return path


class FunctionBuilder:
    """Inputs, states and operations of one function, in order."""

    def __init__(self, builder: Builder, name: str) -> None:
        self.builder = builder
        self.function = builder.model.mlProgram.functions[name]
        self.function.opset = builder.opset
        self.block = self.function.block_specializations[builder.opset]
        self.described = builder.model.description.functions.add()
        self.described.name = name

    def input(self, name: str, dtype: str, shape: Dims, ranges: Sequence[tuple[int, int]] | None = None) -> str:
        """`ranges` gives the inclusive bounds of every axis where some are flexible."""
        _set_type(self.function.inputs.add(name=name).type.tensorType, dtype, shape)
        array = self.described.input.add(name=name).type.multiArrayType
        array.shape.extend(low for low, _ in ranges) if ranges else array.shape.extend(n or 1 for n in shape)
        for low, high in ranges or ():
            array.shapeRange.sizeRanges.add(lowerBound=low, upperBound=high)
        return name

    def state(self, name: str, dtype: str, shape: Dims) -> str:
        _set_type(self.function.inputs.add(name=name).type.stateType.wrappedType.tensorType, dtype, shape)
        return name

    def op(self, kind: str, outputs: Sequence[tuple[str, str, Dims]] | tuple[str, str, Dims], **inputs: Any) -> str:
        """Add an operation; an input is a value's name, a constant, or a list of them. Returns the first output."""
        named = {
            parameter: [part if isinstance(part, str) else self.const(part)
                        for part in (value if isinstance(value, list) else [value])]
            for parameter, value in inputs.items()
        }  # fmt: skip
        operation = self.block.operations.add(type=kind)
        for parameter, names in named.items():
            for name in names:
                operation.inputs[parameter].arguments.add(name=name)
        rows = [outputs] if outputs and isinstance(outputs[0], str) else outputs
        for name, dtype, shape in rows:  # type: ignore[misc]
            _set_type(operation.outputs.add(name=name).type.tensorType, dtype, shape)  # type: ignore[arg-type]
        return rows[0][0] if rows else ""  # type: ignore[return-value]

    def const(self, value: Any) -> str:
        """A `const` operation; ints, floats and bools are scalars or vectors of int32, fp32 and bool."""
        name = f"const_{len(self.block.operations)}"
        operation = self.block.operations.add(type="const")
        message = operation.attributes["val"]
        if isinstance(value, Text):
            _set_type(message.type.tensorType, "string", ())
            message.immediateValue.tensor.strings.values.append(value.value)
        elif isinstance(value, Blob):
            _set_type(message.type.tensorType, value.dtype, value.array.shape)
            message.blobFileValue.fileName = "@model_path/weights/weight.bin"
            message.blobFileValue.offset = self.builder.blob_offset(value)
        else:
            typed = value if isinstance(value, Typed) else None
            array = np.asarray(value.array if typed else value)
            if typed is None and not isinstance(value, np.ndarray | np.generic) and array.dtype == np.float64:
                array = array.astype(np.float32)
            dtype = typed.dtype if typed else mil_name(array)
            _set_type(message.type.tensorType, dtype, array.shape)
            tensor, flat = message.immediateValue.tensor, array.flatten().tolist()
            if dtype == "bool":
                tensor.bools.values.extend(flat)
            elif dtype == "int32":
                tensor.ints.values.extend(flat)
            elif dtype == "fp32":
                tensor.floats.values.extend(flat)
            else:
                tensor.bytes.values = pack(array, dtype)
        output = operation.outputs.add(name=name)
        output.type.CopyFrom(message.type)
        return name

    def returns(self, *names: str) -> None:
        self.block.outputs.extend(names)


@dataclass
class Text:
    value: str


def _set_type(tensor: Any, dtype: str, shape: Dims) -> None:
    tensor.dataType = TYPE_NUMBERS[dtype]
    tensor.rank = len(shape)
    for size in shape:
        if size is None:
            tensor.dimensions.add().unknown.variadic = False
        else:
            tensor.dimensions.add().constant.size = size


def one_operator(path: Path, kind: str, result: tuple[str, Dims], inputs: Mapping[str, Any]) -> Path:
    """A package whose main function takes nothing and applies one operator to constants."""
    builder = Builder()
    function = builder.function()
    function.op(kind, ("y", *result), **inputs)
    function.returns("y")
    return builder.save(path)
