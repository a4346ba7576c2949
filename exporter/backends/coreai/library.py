"""Core AI's packages, imported where they are needed."""

from __future__ import annotations

from types import ModuleType

from exporter.optional import optional


def library(module: str) -> ModuleType:
    """A module of coreai-core, coreai-torch or coreai-opt.

    Raises:
        MissingPackageError: it is not installed, or cannot be loaded on this platform.
    """
    return optional(module, "coreai")
