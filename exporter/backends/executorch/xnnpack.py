"""XNNPACK's options, which ExecuTorch's Python binding does not reach."""

from __future__ import annotations

import ctypes
from pathlib import Path

BACKEND = b"XnnpackBackend"
WEIGHT_CACHE = b"weight_cache_enabled"
SET_OPTION = "_ZN10executorch7runtime10set_optionEPKcNS0_4SpanINS0_13BackendOptionEEE"
"""``executorch::runtime::set_option(const char*, Span<BackendOption>)``; a span of a plain type is passed as its two
words."""


class BackendOption(ctypes.Structure):
    """``executorch::runtime::BackendOption`` (runtime/backend/options.h): a key of 64 bytes and a
    ``std::variant<bool, int, std::array<char, 256>>``, of which `index` says what it holds."""

    _fields_ = (
        ("key", ctypes.c_char * 64),
        ("value", ctypes.c_ubyte * 256),
        ("index", ctypes.c_ubyte),
        ("padding", ctypes.c_ubyte * 3),
    )


def executorch_root() -> Path:
    """The directory of the installed ExecuTorch, with its libraries and headers."""
    import executorch

    return Path(next(iter(executorch.__path__)))


def share_packed_weights(share: bool) -> None:
    """Whether the methods of a program loaded from now on share their packed weights, as an app decides by the same
    option. Otherwise each method packs a copy of every weight.

    The cache knows a weight by its integers alone (ExecuTorch 1.5.1): of two programs in one process whose matrices
    have equal integers and different scales, the second computes with the first one's scales. So only one program at a
    time may share. Where this build of ExecuTorch has no such function, methods are loaded as it loads them.
    """
    libraries = executorch_root() / "lib"
    found = next((file for file in libraries.glob("libexecutorch.*") if file.suffix in (".so", ".dylib")), None)
    set_option = None if found is None else getattr(ctypes.CDLL(str(found)), SET_OPTION, None)
    if set_option is None:
        return
    option = BackendOption(key=WEIGHT_CACHE)
    option.value[0] = int(share)  # a bool, the variant's first alternative
    set_option.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t)
    set_option.restype = ctypes.c_uint32
    error = set_option(BACKEND, ctypes.byref(option), 1)
    assert error == 0, f"{WEIGHT_CACHE.decode()} was refused: 0x{error:x}"
