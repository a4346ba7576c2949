"""The methods of a program share their packed weights, as an app decides by an option of XNNPACK's.

By itself each method packs a copy of every weight. ExecuTorch's Python binding does not reach the option
(``weight_cache_enabled``), so ExecuTorch's C++ function is called by its mangled name.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

from exporter.tricks.base import say_once, trick

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


@trick(saves="515 of 976 MB above the bare process while a program is loaded", made_for={"executorch": "1.5.1"})
def packed_weights(libraries: Path) -> Iterator[None]:
    """Methods loaded inside share their packed weights, with each other and with those that were loaded so before.

    The cache knows a weight by its integers alone: of two programs in one process whose matrices have equal integers
    and different scales, the second computes with the first one's scales. So only one program at a time may be loaded
    in here.

    Args:
        libraries: the folder of ExecuTorch's shared libraries.
    """
    set_weight_cache = option_setter(libraries)
    if set_weight_cache is None:
        say_once("packed_weights", "trick packed_weights is left out: this build of ExecuTorch has no set_option")
        yield
        return
    set_weight_cache(True)
    try:
        yield
    finally:
        set_weight_cache(False)  # as it is by itself; a delegate remembers what it was loaded with


def option_setter(libraries: Path) -> Callable[[bool], None] | None:
    """What switches XNNPACK's weight cache for the methods loaded from then on; None where the function is missing."""
    found = next((file for file in libraries.glob("libexecutorch.*") if file.suffix in (".so", ".dylib")), None)
    function = None if found is None else getattr(ctypes.CDLL(str(found)), SET_OPTION, None)
    if function is None:
        return None
    function.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = ctypes.c_uint32

    def set_weight_cache(share: bool) -> None:
        option = BackendOption(key=WEIGHT_CACHE)
        option.value[0] = int(share)  # a bool, the variant's first alternative
        error = function(BACKEND, ctypes.byref(option), 1)
        assert error == 0, f"{WEIGHT_CACHE.decode()} was refused: 0x{error:x}"

    return set_weight_cache
