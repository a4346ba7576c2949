"""The pages of a mapped program file that stay in memory."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

MADV_DONTNEED = 4  # on Linux; macOS has the same name for advice that it does not follow
CAPABILITY_VERSION, CAP_IPC_LOCK = 0x20080522, 14  # linux/capability.h
LIBC = ctypes.CDLL(None, use_errno=True)


class FilePages:
    """Where this process maps `path`."""

    def __init__(self, path: Path) -> None:
        self.spans: list[tuple[int, int]] = []
        """First byte and number of bytes of each mapping; none on systems that do not tell."""
        if sys.platform != "linux":
            return
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, *_, name = line.split(maxsplit=5)
            if name == str(path.resolve()):
                start, end = (int(part, 16) for part in span.split("-"))
                self.spans.append((start, end - start))

    def release(self) -> None:
        """Let the system drop the pages; they are read again where they are needed."""
        for start, length in self.spans:
            LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), MADV_DONTNEED)


@contextlib.contextmanager
def nothing_locked() -> Iterator[None]:
    """Refuse to lock memory in here.

    ExecuTorch's Python binding locks the segments it loads, so the whole of them is read at once: the embedding's table
    would be resident beside the copy that the head was packed into, and what the second method shares with the first
    would be read again for nothing. It goes on where a lock is refused. An app maps its program without locking
    (``LoadMode::Mmap``).
    """
    if sys.platform != "linux":
        yield
        return
    import resource

    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, limits[1]))
    locks = _may_lock_without_limit(False)
    try:
        yield
    finally:
        _may_lock_without_limit(locks)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, limits)


def _may_lock_without_limit(may: bool) -> bool:
    """Root's capability to lock memory beyond the limit, taken from this thread or given back; whether it had it."""
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice 32 bits each
    if LIBC.capget(header, sets) != 0:
        return False
    had = bool(sets[0] >> CAP_IPC_LOCK & 1)
    if had != may:
        sets[0] ^= 1 << CAP_IPC_LOCK
        assert LIBC.capset(header, sets) == 0, "the thread's own capability"
    return had
