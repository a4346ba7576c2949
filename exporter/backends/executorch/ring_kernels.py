"""The attention kernels of `native/` in this process, in place of ExecuTorch's ``llama::custom_sdpa``.

An app links the same sources. Here they are compiled once for this machine's processor, by its own compiler, into the
user's cache.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from exporter.machine import CACHE

SOURCES = Path(__file__).resolve().parents[3] / "native"
CACHE_DIR = CACHE / "kernels"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-DET_USE_THREADPOOL", "-DC10_USING_CUSTOM_GENERATED_MACROS")
# ARM's compilers name the processor, x86's its instructions.
NATIVE = "-mcpu=native" if platform.machine().lower() in ("arm64", "aarch64") else "-march=native"
LIBRARIES = ("executorch", "executorch_threadpool")


def executorch_root() -> Path:
    """The directory of the installed ExecuTorch, with its libraries and headers."""
    import executorch

    return Path(next(iter(executorch.__path__)))


def compiler() -> str | None:
    """The first C++ compiler on the path."""
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


def _identity(tool: str) -> str:
    """A digest of what the library depends on: the sources, the flags, ExecuTorch, the compiler, the processor."""
    from importlib.metadata import version

    macros = subprocess.run([tool, NATIVE, "-dM", "-E", "-x", "c++", os.devnull], capture_output=True, check=True)
    parts = [file.read_bytes() for file in sorted(SOURCES.iterdir()) if file.suffix in (".h", ".cpp")]
    digest = hashlib.sha256(b"\0".join([*parts, " ".join(FLAGS).encode(), version("executorch").encode()]))
    digest.update(macros.stdout)
    return digest.hexdigest()[:24]


@functools.cache
def build() -> Path | None:
    """The compiled library, built if it is not there yet; None where no compiler can build it."""
    tool = compiler()
    if tool is None:
        return None
    try:
        folder = CACHE_DIR.expanduser()
        library = folder / f"ring-{_identity(tool)}.so"
        if library.exists():
            return library
        folder.mkdir(parents=True, exist_ok=True)
        root = executorch_root()
        c10 = root / "include" / "executorch" / "runtime" / "core" / "portable_type" / "c10"
        with tempfile.TemporaryDirectory(dir=folder) as staging:
            staged = Path(staging) / library.name
            subprocess.run(
                [
                    tool, *FLAGS, NATIVE, "-isystem", str(root / "include"), "-isystem", str(c10),
                    *(str(file) for file in sorted(SOURCES.glob("*.cpp"))), "-o", str(staged),
                    f"-L{root / 'lib'}", *(f"-l{name}" for name in LIBRARIES),
                ],
                capture_output=True, check=True,
            )  # fmt: skip
            staged.replace(library)
    except (OSError, subprocess.CalledProcessError):
        return None
    return library


@functools.cache
def _load() -> ctypes.CDLL | None:
    """The library in this process; ExecuTorch must be imported already, for its symbols."""
    library = build()
    if library is None:
        return None
    try:
        return ctypes.CDLL(str(library))
    except OSError:
        return None


def use_ring_kernels(use: bool) -> bool:
    """Choose the attention kernels of methods loaded from now on: these or ExecuTorch's. True if they are these.

    Without a compiler they are ExecuTorch's: the same results, but slower.
    """
    library = _load()
    return library is not None and bool(library.ring_use_kernels(int(use)))
