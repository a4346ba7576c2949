"""Reader of ``weight.bin``, the file beside a program that holds its large constants.

Little-endian. A header of 64 bytes (count uint32, version uint32 = 2), then, each aligned to 64 bytes, entries of
metadata followed by data. Metadata: sentinel uint32 = 0xDEADBEEF, element type uint32, size in bytes uint64, offset of
the data uint64, padding in bits uint64 (what the last byte of a packed type leaves unused). A program refers to an
entry by the offset of its metadata.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path

import torch

from exporter.backends.coreml.evaluator.dtypes import BY_BLOB_NUMBER, ElementType, decode, storage_bytes
from exporter.errors import BundleError

HEADER = struct.Struct("<II")
METADATA = struct.Struct("<IIQQQ")
HEADER_BYTES, SENTINEL, VERSION = 64, 0xDEADBEEF, 2


class BlobFile:
    """One weight file, opened again for each entry, so nothing of it stays in memory.

    Raises:
        BundleError: the file is missing or does not start like a weight file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise self._error(got="no such file", expected="the weights that the program refers to")
        self.size = path.stat().st_size
        if self.size < HEADER_BYTES:
            raise self._error(got=f"{self.size} bytes", expected=f"a header of {HEADER_BYTES} bytes")
        _, version = HEADER.unpack(self._bytes(0, HEADER.size))
        if version != VERSION:
            raise self._error(got=f"format version {version}", expected=f"version {VERSION}")

    def read(self, offset: int, element: ElementType, shape: Sequence[int]) -> torch.Tensor:
        """The entry whose metadata is at `offset`, as the carrier of `element`.

        Raises:
            BundleError: the entry lies outside the file, is no entry, or is not of that type and size.
        """
        where = f"offset {offset}"
        if offset < HEADER_BYTES or offset + METADATA.size > self.size:
            raise self._error(got=where, expected=f"an offset of metadata within the file's {self.size} bytes")
        sentinel, number, size, start, padding = METADATA.unpack(self._bytes(offset, METADATA.size))
        if sentinel != SENTINEL:
            raise self._error(got=f"sentinel {sentinel:#x} at {where}", expected=f"{SENTINEL:#x}")
        stored = BY_BLOB_NUMBER.get(number)
        # The file has no bool: it is kept as uint8.
        if stored is not element and not (element.name == "bool" and stored is BY_BLOB_NUMBER[3]):
            raise self._error(
                got=f"element type {number if stored is None else stored.name} at {where}",
                expected=f"{element.name}, as the program declares",
            )
        count = math.prod(shape)
        if size != storage_bytes(element, count):
            raise self._error(
                got=f"{size} bytes at {where}",
                expected=f"{storage_bytes(element, count)} for {element.name} {list(shape)}",
            )
        if padding != size * 8 - count * element.bits:
            raise self._error(
                got=f"{padding} bits of padding at {where}",
                expected=f"{size * 8 - count * element.bits} for {element.name} {list(shape)}",
            )
        if start + size > self.size:
            raise self._error(got=f"data to byte {start + size}", expected=f"at most {self.size}, the file's end")
        raw = self._bytes(start, size)
        if element.name == "bool":
            return decode(raw, BY_BLOB_NUMBER[3], count).view(tuple(shape)) != 0
        return decode(raw, element, count).view(tuple(shape))

    def _bytes(self, start: int, size: int) -> bytearray:
        buffer = bytearray(size)
        with self.path.open("rb") as file:
            file.seek(start)
            read = file.readinto(buffer)
        assert read == size, f"{self.path.name} shrank while it was read"
        return buffer

    def _error(self, *, got: str, expected: str) -> BundleError:
        repair = "The file is damaged or belongs to another program: copy the package again, or export it again."
        return BundleError(f"weights {self.path.name}", got=got, expected=expected, repair=repair)
