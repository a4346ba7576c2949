"""The pages of a mapped program file that stay in memory."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

MADV_DONTNEED = 4  # on Linux; macOS has the same name for advice that it does not follow


def release_file_pages(path: Path) -> None:
    """Let the system drop the pages of `path` that this process maps; they are read again where they are needed.

    ExecuTorch's Python binding locks the segments it loads into memory, so the embedding's table would be resident
    whole, beside the copy that the head was packed into. An app maps its program without locking (``LoadMode::Mmap``).
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, name = line.split(maxsplit=5)
        if name == str(path.resolve()):
            start, end = (int(part, 16) for part in span.split("-"))
            area = ctypes.c_void_p(start), ctypes.c_size_t(end - start)
            libc.munlock(*area)
            libc.madvise(*area, MADV_DONTNEED)
