"""LEAF: room on a disk for a file that a native library writes.

Such libraries end badly on a full disk: coremltools with an error without a reason, Core AI's writer by ending the
process. So room is taken and given back before they write, and what they write beside goes where it is removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

MARGIN, SHARE = 4 * 2**20, 1.05
"""What a program's file has beside its weights: bytes, and a share of them."""


def require_room(directory: Path, weights: int) -> None:
    """Whether a file with so many bytes of weights has room in `directory`.

    Raises:
        OSError: the disk is full (ENOSPC, EDQUOT), or no file may be as large (EFBIG).
    """
    with tempfile.TemporaryFile(dir=directory) as file, _named(directory):
        os.posix_fallocate(file.fileno(), 0, int(SHARE * weights) + MARGIN)


@contextlib.contextmanager
def temporary_files_in(directory: Path) -> Iterator[None]:
    """Inside, temporary files of this process stand in a folder of `directory`, which goes with all that libraries left
    in it."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(dir=directory, prefix=".temporary", ignore_cleanup_errors=True) as folder:
        tempfile.tempdir = folder
        try:
            yield
        finally:
            tempfile.tempdir = before


@contextlib.contextmanager
def _named(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):  # a file system that cannot say
            return
        raise OSError(error.errno, error.strerror, str(directory)) from error
