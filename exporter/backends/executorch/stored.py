"""How often a `.pte` stores the same bytes."""

from __future__ import annotations

import hashlib
import mmap
from dataclasses import dataclass

from exporter.backends.executorch.file import Blob, PteFile


@dataclass(frozen=True)
class StoredWeights:
    """`unique_bytes` counts every distinct content once, `duplicate_bytes` its repetitions elsewhere in the file."""

    unique_bytes: int
    duplicate_bytes: int
    duplicates: tuple[tuple[Blob, ...], ...]

    @property
    def duplicate_share(self) -> float:
        return self.duplicate_bytes / self.unique_bytes if self.unique_bytes else 0.0


def stored_weights(data: bytes | mmap.mmap, file: PteFile) -> StoredWeights:
    """Hash every blob of the file. Two references to one place count once: segments may share bytes of the file."""
    places: dict[int, Blob] = {}
    for blob in file.blobs():
        known = places.get(blob.offset)
        if blob.size and (known is None or known.size < blob.size):
            places[blob.offset] = blob
    view = memoryview(data)
    by_content: dict[bytes, list[Blob]] = {}
    for blob in places.values():
        digest = hashlib.blake2b(view[blob.offset : blob.offset + blob.size]).digest()
        by_content.setdefault(digest, []).append(blob)
    duplicates = tuple(tuple(blobs) for blobs in by_content.values() if len(blobs) > 1)
    return StoredWeights(
        unique_bytes=sum(blobs[0].size for blobs in by_content.values()),
        duplicate_bytes=sum(blobs[0].size * (len(blobs) - 1) for blobs in duplicates),
        duplicates=duplicates,
    )
