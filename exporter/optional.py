"""LEAF: imports of packages that only one format needs."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
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
        raise _missing(extra, f"no {module} ({error})") from error


def require(distributions: Iterable[str], extra: str) -> None:
    """Refuse, without importing anything, to go on where a distribution of an extra is not installed.

    Raises:
        MissingPackageError: the first that is not.
    """
    for name in distributions:
        try:
            version(name)
        except PackageNotFoundError as error:
            raise _missing(extra, f"no {name}") from error


def _missing(extra: str, got: str) -> MissingPackageError:
    from exporter.backends import traits  # which imports this module

    return MissingPackageError(
        f"format {extra}",
        got=got,
        expected=f"the packages of the extra `{extra}`, which exist for {traits(extra).platforms}",
        repair=f"pip install 'ring-exporter[{extra}]', or take another of `targets`, or of --format.",
    )
