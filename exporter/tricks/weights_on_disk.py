"""Weights of delegates go to disk while a program is lowered.

XNNPACK's back end copies every weight into a store, so those of two methods would be in memory twice until the file is
written. ExecuTorch's stores take files as well as bytes: here there is one for each weight, whoever asks for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from exporter.tricks.base import LOWERING, patched, trick

MIN_BYTES = 2**16
"""Smaller ones are not worth a file."""


@trick(saves="0.26 of 1.94 GB of the peak of an export", made_for=LOWERING)
def weights_on_disk(folder: Path) -> Iterator[None]:
    """Delegates keep their large weights in `folder`, which must be there until the program is written."""
    from executorch.backends.xnnpack import xnnpack_preprocess
    from executorch.exir._serialize._named_data_store import NamedDataStore

    class StoreOnDisk(NamedDataStore):
        """A store whose large data are files in `folder`."""

        def add_named_data(self, key: str, data: Any, *arguments: Any, **options: Any) -> None:
            """See `NamedDataStore`; arguments after `data` are handed on."""
            super().add_named_data(key, kept(data, folder), *arguments, **options)

    with patched(xnnpack_preprocess, "NamedDataStore", StoreOnDisk):
        yield


def kept(data: Any, folder: Path) -> Any:
    """`data`, or a file in `folder` with the same bytes if they are many."""
    from executorch.exir._serialize._cord import FileBackedData

    if not isinstance(data, bytes) or len(data) < MIN_BYTES:
        return data
    digest = hashlib.sha256(data)
    path = folder / digest.hexdigest()
    if not path.exists():
        path.write_bytes(data)
    return FileBackedData(str(path), sha256=digest.digest())
