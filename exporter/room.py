"""LEAF: room on a disk for files that a native library writes.

Such libraries end badly on a full disk: coremltools with an error without a reason, Core AI's writer and interpreter by
ending the process. So room is taken and given back before they write, what they write beside goes where it is removed,
and what coremltools says of a disk that filled up in the meantime is said as Python says it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

MARGIN, SHARE = 4 * 2**20, 1.05
"""What a program's file has beside its weights: bytes, and a share of them."""


def require_room(directory: Path, weights: int, *, copies: int = 1, margin: int = MARGIN) -> None:
    """Whether `copies` files with so many bytes of weights and `margin` more have room in `directory`.

    Raises:
        OSError: the disk is full (ENOSPC, EDQUOT), or no file may be as large (EFBIG).
    """
    with contextlib.ExitStack() as stack, _named(directory):
        for _ in range(copies):
            file = stack.enter_context(tempfile.TemporaryFile(dir=directory))
            os.posix_fallocate(file.fileno(), 0, int(SHARE * weights) + margin)


@contextlib.contextmanager
def native_writing(directory: Path) -> Iterator[None]:
    """Inside, coremltools writes to `directory`, and temporary files of this process stand in a folder there, which
    goes with all that was left in it.

    Raises:
        OSError: it could not write.
    """
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(dir=directory, prefix=".temporary", ignore_cleanup_errors=True) as folder:
        tempfile.tempdir = folder
        try:
            yield
        except shutil.Error as error:  # of a copied tree: (from, to, reason) of each file
            raise OSError(_reason(str(error)), str(error), str(directory)) from error
        except RuntimeError as error:
            if "FileWriter" not in str(error):
                raise
            raise OSError(errno.EIO, str(error), str(directory)) from error
        finally:
            tempfile.tempdir = before


def _reason(text: str) -> int:
    """The errno that a text quotes as Python prints it."""
    reasons = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return next((reason for reason in reasons if f"[Errno {reason}]" in text), errno.EIO)


@contextlib.contextmanager
def _named(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):  # a file system that cannot say
            return
        raise OSError(error.errno, error.strerror, str(directory)) from error
