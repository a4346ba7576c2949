"""Let two references to equal bytes share one place in a `.pte`.

A tied embedding is two constants of a lowered program: a tensor from which the embedding gathers, and a named blob from
which the delegate packs its head. Both have the same bytes. A segment of a `.pte` is an offset and a size, and segments
may overlap, so the blob's segment points into the tensor's and its own copy is left out.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from executorch.exir._serialize import _program as pte
from executorch.exir._serialize._flatbuffer_program import _flatbuffer_to_program, _program_to_flatbuffer
from executorch.exir._serialize.padding import aligned_size, pad_to

from exporter.backends.executorch.file import HEADER_BYTES, read_pte

SEGMENT_ALIGNMENT = 128
MIN_BYTES = 4096  # smaller blobs are not worth an unaligned segment
PIECE = 2**23  # bytes read at a time: the whole file is never in memory


def share_equal_bytes(source: Path, target: Path) -> None:
    """Write to `target` the program in `source` with every named blob that repeats a constant tensor's bytes pointed at
    that tensor."""
    with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        header = pte._get_extended_header(data[:HEADER_BYTES])
        assert header is not None, "a lowered program carries its constants in segments"
        program = _flatbuffer_to_program(data[: header.program_size])
        base = header.segment_base_offset
        blobs = [blob for blob in read_pte(data).constants.values() if blob.size >= MIN_BYTES]

        constants = {(blob.size, _digest(file, blob.offset, blob.size)): blob.offset - base for blob in blobs}
        sizes = {size for size, _ in constants}
        named = {entry.segment_index for entry in program.named_data or []}
        shared: dict[int, int] = {}  # segment -> the place of its twin, counted from the first segment as it is now
        for index in named:
            segment = program.segments[index]
            if segment.size in sizes:
                twin = constants.get((segment.size, _digest(file, base + segment.offset, segment.size)))
                if twin is not None:
                    shared[index] = twin

        old = [(segment.offset, segment.size) for segment in program.segments]
        end = 0
        for index, segment in enumerate(program.segments):
            if index not in shared:
                segment.offset = aligned_size(end, SEGMENT_ALIGNMENT)
                end = segment.offset + segment.size
        for index, place in shared.items():
            home = next(
                i for i, (offset, size) in enumerate(old) if i not in shared and offset <= place < offset + size
            )
            program.segments[index].offset = program.segments[home].offset + place - old[home][0]

        with target.open("wb") as out:
            start = out.write(_program_bytes(program, end))
            for index, (offset, size) in enumerate(old):
                if index not in shared:
                    out.write(bytes(start + program.segments[index].offset - out.tell()))
                    for piece in _pieces(file, base + offset, size):
                        out.write(piece)


def _pieces(file: BinaryIO, offset: int, size: int) -> Iterator[bytes]:
    file.seek(offset)
    while size:
        piece = file.read(min(size, PIECE))
        size -= len(piece)
        yield piece


def _digest(file: BinaryIO, offset: int, size: int) -> bytes:
    found = hashlib.blake2b()
    for piece in _pieces(file, offset, size):
        found.update(piece)
    return found.digest()


def _program_bytes(program: pte.Program, segment_bytes: int) -> bytes:
    """The flatbuffer with its extended header, padded to where the first segment begins."""
    flatbuffer = _program_to_flatbuffer(program)
    header_length = aligned_size(pte._ExtendedHeader.EXPECTED_LENGTH, flatbuffer.max_alignment)
    program_size = header_length + len(flatbuffer.data)
    base = aligned_size(program_size, SEGMENT_ALIGNMENT)
    header = pte._ExtendedHeader(
        program_size=program_size, segment_base_offset=base, segment_data_size=segment_bytes
    ).to_bytes()
    with_header = pte._insert_flatbuffer_header(
        flatbuffer_data=flatbuffer.data,
        magic_regex=r"ET[0-9a-zA-Z][0-9a-zA-Z]",
        header_data=pad_to(header, header_length),
    )
    return pad_to(with_header, base)
