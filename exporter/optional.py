"""LEAF: imports of packages that only one format needs."""

from __future__ import annotations

import importlib
from types import ModuleType

from exporter.errors import MissingPackageError
from exporter.quiet import native_stderr_hidden


def optional(module: str, extra: str) -> ModuleType:
    """Import `module`, which belongs to the pip extra `extra`.

    Raises:
        MissingPackageError: it is not installed, or cannot be loaded on this platform.
    """
    try:
        with native_stderr_hidden():
            return importlib.import_module(module)
    except (ImportError, OSError) as error:
        raise MissingPackageError(
            f"format {extra}",
            got=f"no {module} ({error})",
            expected=f"the packages of the extra `{extra}`, which exist for Linux on x86-64 (glibc 2.34 or newer) and "
            "for macOS",
            repair=f"pip install 'ring-exporter[{extra}]', or take {extra} out of `targets`.",
        ) from error
