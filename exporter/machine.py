"""LEAF: what this machine is and how much of its memory this process holds."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

from exporter.units import in_unit

CACHE = Path("~/.cache/ring-exporter")
"""Where files are kept that are made once for this user: joined checkpoints, compiled kernels."""
_STATUS = Path("/proc/self/status")
_PROCESSORS = Path("/proc/cpuinfo")


def machine() -> str:
    """The processor with its threads, the memory and the Python, in a line."""
    cpu = platform.processor() or platform.machine()
    if _PROCESSORS.exists():
        lines = _PROCESSORS.read_text(encoding="utf-8").splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{os.cpu_count()} threads of {cpu}, {in_unit(memory, 'GiB', 0)}, Python {platform.python_version()}"


def _status_bytes(key: str) -> int | None:
    """A line of Linux's account of this process, e.g. ``VmHWM:  1234 kB``; None on other systems."""
    if not _STATUS.exists():
        return None
    line = next(line for line in _STATUS.read_text(encoding="ascii").splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def release_freed_memory() -> None:
    """Collect what nothing refers to, and give freed memory back to the system where malloc can: a tokenizer and a
    lowering leave hundreds of megabytes behind that the next step would come on top of."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


LARGE_BYTES = 2**24
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


def return_large_memory() -> None:
    """From now on blocks of `LARGE_BYTES` go back to the system when they are freed, where malloc can: by itself glibc
    keeps up to 32 MB each, and matrices of a 1B model are just below. Smaller ones are still kept, for page faults
    cost more than they do."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 4 * LARGE_BYTES)


def peak_memory_bytes() -> int:
    """The largest resident set this process ever had.

    Not ``ru_maxrss`` on Linux: that survives exec, so a small child of a large process reports its parent's.
    """
    peak = _status_bytes("VmHWM")
    if peak is not None:
        return peak
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, KiB elsewhere
    return used if sys.platform == "darwin" else used * 1024


@dataclass(frozen=True)
class ResidentParts:
    """The resident set of a process in two parts, bytes.

    Attributes:
        anonymous: memory that no file holds: what the process wrote, shared memory included. The system cannot drop it.
        file: pages of mapped files, libraries among them, which it can drop and read again.
    """

    anonymous: int
    file: int


def resident_parts() -> ResidentParts | None:
    """Of this process now; None on systems that do not tell. (The kernel keeps no peak of either.)"""
    anonymous, shared, file = (_status_bytes(key) for key in ("RssAnon", "RssShmem", "RssFile"))
    if anonymous is None or shared is None or file is None:
        return None
    return ResidentParts(anonymous + shared, file)


def resident_bytes() -> int:
    """The resident set of this process now; its peak on systems that do not tell."""
    now = _status_bytes("VmRSS")
    return peak_memory_bytes() if now is None else now
