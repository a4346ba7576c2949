"""The header of a GGUF file (version 2 or 3, little endian): metadata and the table of tensors, no tensor data.

Layout: the GGUF specification in ggml's ``docs/gguf.md``. The header is read here rather than with
``gguf.GGUFReader``, which makes several numpy views an array element (seconds and hundreds of megabytes for a
vocabulary of 262144) and does not say where a truncated file ends.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from exporter.checkpoint.kind import GGUF_MAGIC
from exporter.errors import CheckpointError

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
# Larger than any real name, vocabulary or table; a damaged length must not become an allocation.
_MAX_LENGTH = 1 << 28


@dataclass(frozen=True)
class GGUFTensor:
    """One row of the tensor table: `shape` in torch's order, slowest first; `offset` from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GGUFHeader:
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


class _Damaged(Exception):
    """What is wrong with the bytes at hand; `read_header` adds the file's name."""


class _Reader:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def take(self, count: int) -> bytes:
        if count > _MAX_LENGTH:
            raise _Damaged(f"a length of {count} at byte {self._file.tell()}")
        data = self._file.read(count)
        if len(data) != count:
            raise _Damaged(f"a header that ends at byte {self._file.tell()}")
        return data

    def position(self) -> int:
        return self._file.tell()

    def u32(self) -> int:
        return int(struct.unpack("<I", self.take(4))[0])

    def u64(self) -> int:
        return int(struct.unpack("<Q", self.take(8))[0])

    def text(self) -> str:
        try:
            return self.take(self.u64()).decode("utf-8")
        except UnicodeDecodeError as error:
            raise _Damaged(f"a string that is no UTF-8 before byte {self.position()}") from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            inner, count = self.u32(), self.u64()
            if inner in _SCALARS:
                dtype = np.dtype(_SCALARS[inner])
                return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
            if count > _MAX_LENGTH:
                raise _Damaged(f"an array of {count} items at byte {self.position()}")
            return [self.value(inner) for _ in range(count)]
        if kind not in _SCALARS:
            raise _Damaged(f"a value of type {kind} at byte {self.position()}")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()


def _read_tensor(reader: _Reader) -> GGUFTensor:
    name = reader.text()
    dims = [reader.u64() for _ in range(min(reader.u32(), 8))]
    kind, offset = reader.u32(), reader.u64()
    try:
        ggml_type = GGMLQuantizationType(kind)
    except ValueError as error:
        raise _Damaged(f"tensor {name} of unknown type {kind}") from error
    block, block_bytes = GGML_QUANT_SIZES[ggml_type]
    elements = 1
    for dim in dims:
        elements *= dim
    if not dims or dims[0] % block:
        raise _Damaged(f"tensor {name} with dimensions {dims}, whose rows are no multiple of the block size {block}")
    return GGUFTensor(name, tuple(reversed(dims)), ggml_type, offset, elements // block * block_bytes)


def _read(reader: _Reader, size: int) -> GGUFHeader:
    version = reader.u32()
    if version not in (2, 3):
        raise _Damaged(f"GGUF version {version}")
    tensor_count, metadata_count = reader.u64(), reader.u64()
    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        key = reader.text()
        if key in metadata:
            raise _Damaged(f"metadata key {key} twice")
        metadata[key] = reader.value(reader.u32())
    table = [_read_tensor(reader) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise _Damaged(f"general.alignment {alignment!r}")
    start = -(-reader.position() // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for row in table:
        tensor = GGUFTensor(row.name, row.shape, row.type, start + row.offset, row.num_bytes)
        if tensor.name in tensors:
            raise _Damaged(f"tensor {tensor.name} twice")
        if tensor.offset + tensor.num_bytes > size:
            raise _Damaged(
                f"{size} bytes, and tensor {tensor.name} ends at byte {tensor.offset + tensor.num_bytes} (truncated)"
            )
        tensors[tensor.name] = tensor
    return GGUFHeader(metadata, tensors)


def read_header(path: Path) -> GGUFHeader:
    """Read metadata and tensor table of a file that begins as a GGUF file does.

    Raises:
        CheckpointError: an unsupported version, a damaged header, tensor data past the file's end, or
            one part of a split model.
    """
    with path.open("rb") as file:
        assert file.read(len(GGUF_MAGIC)) == GGUF_MAGIC, f"{path.name} is of another kind"
        try:
            header = _read(_Reader(file), path.stat().st_size)
        except _Damaged as damage:
            raise CheckpointError(
                f"checkpoint {path.name}",
                got=str(damage),
                expected="a complete little-endian GGUF file of version 2 or 3",
                repair="Download or copy the file again.",
            ) from damage
    if header.metadata.get("split.count", 1) > 1:
        raise CheckpointError(
            f"checkpoint {path.name}",
            got=f"one of {header.metadata['split.count']} parts of a split model",
            expected="a GGUF file that holds the whole model",
            repair="Merge the parts with llama.cpp's gguf-split --merge.",
        )
    return header
