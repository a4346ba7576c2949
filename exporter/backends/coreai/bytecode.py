"""The blobs of an MLIR bytecode file: where an asset keeps its large constants.

The layout is MLIR's own ("MLIR Bytecode Format", version 6): a header, then sections; one lists the size of every
resource in order, another holds them, each after its alignment and its length.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from exporter.errors import BundleError
from exporter.graph.repeats import SMALL, orderless_digest

MAGIC = b"ML\xefR"
_RESOURCES, _RESOURCE_SIZES = 5, 6
_BLOB = 0


@dataclass(frozen=True)
class Blob:
    """One stored constant: its place in the file, its length, and its `orderless_digest`."""

    offset: int
    size: int
    digest: bytes


@dataclass(frozen=True)
class StoredBlobs:
    """Every blob of a file of `file_bytes`."""

    file_bytes: int
    blobs: tuple[Blob, ...]

    @property
    def blob_bytes(self) -> int:
        return sum(blob.size for blob in self.blobs)

    @property
    def repeated(self) -> tuple[Blob, ...]:
        """The large blobs that hold the same numbers as an earlier one, in any order."""
        first: dict[bytes, Blob] = {}
        large = [blob for blob in self.blobs if blob.size >= SMALL]
        return tuple(blob for blob in large if first.setdefault(blob.digest, blob) is not blob)


def stored_blobs(path: Path) -> StoredBlobs:
    """The blobs of the bytecode file at `path`.

    Raises:
        BundleError: it is no MLIR bytecode, or ends early.
    """
    data = memoryview(path.read_bytes())
    try:
        return StoredBlobs(len(data), tuple(_blobs(data)))
    except (IndexError, ValueError) as error:
        raise BundleError(
            f"program {path.name}",
            got=f"{len(data)} bytes that are no MLIR bytecode ({error})",
            expected="the main.mlirb of a Core AI asset",
            repair="Export the model again.",
        ) from error


def _blobs(data: memoryview) -> list[Blob]:
    sections = _sections(data)
    if _RESOURCE_SIZES not in sections:
        return []
    at, end = sections[_RESOURCE_SIZES]
    place = sections[_RESOURCES][0]
    found = []
    _, at = _number(data, at)  # how many groups belong to external owners; those of the dialects follow, alike in form
    while at < end:
        _, at = _number(data, at)
        count, at = _number(data, at)
        for _ in range(count):
            _, at = _number(data, at)
            length, at = _number(data, at)
            kind, at = data[at], at + 1
            if kind == _BLOB:
                alignment, start = _number(data, place)
                size, start = _number(data, start)
                start += -start % alignment
                content = data[start : start + size]
                if len(content) != size:
                    raise ValueError(f"a constant of {size} bytes has {len(content)}")
                found.append(Blob(start, size, orderless_digest(content)))
            place += length
    return found


def _sections(data: memoryview) -> dict[int, tuple[int, int]]:
    """First and last byte of each section, by its number."""
    if data[:4] != MAGIC:
        raise ValueError("no MLIR header")
    _, at = _number(data, 4)
    while data[at]:  # the producer's name ends with a zero
        at += 1
    at += 1
    sections = {}
    while at < len(data):
        head, at = data[at], at + 1
        length, at = _number(data, at)
        if head & 0x80:
            alignment, at = _number(data, at)
            at += -at % alignment
        sections[head & 0x7F] = (at, at + length)
        at += length
    return sections


def _number(data: memoryview, at: int) -> tuple[int, int]:
    """A variable-length integer and what follows it: trailing zero bits of the first byte count the further ones."""
    first = data[at]
    if first == 0:
        return int.from_bytes(data[at + 1 : at + 9], "little"), at + 9
    more = (first & -first).bit_length() - 1
    return int.from_bytes(data[at : at + more + 1], "little") >> (more + 1), at + more + 1
