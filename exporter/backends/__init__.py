"""One folder a format. Every folder has the same modules: `traits` and `options` (no torch), `build`, `file`,
`description`, `checks`, `runtime`; a format is known by its folder alone.

A module other than the traits is imported when it is used: its libraries take seconds to load, and some are optional.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import Any

from exporter.backends.base import (
    BuildModule,
    Built,
    ChecksModule,
    DescriptionModule,
    Effort,
    FileModule,
    FormatTraits,
    Program,
    RuntimeModule,
    Step,
)
from exporter.errors import ConfigError
from exporter.optional import require

__all__ = [
    "Built",
    "Effort",
    "FormatTraits",
    "Program",
    "Step",
    "build_module",
    "checks_module",
    "description_module",
    "file_module",
    "format_of_suffix",
    "formats",
    "require_packages",
    "runtime_module",
    "traits",
]

FIRST = "executorch"
"""The format of an export that names none; listed first."""


@cache
def _found() -> dict[str, FormatTraits]:
    names = [info.name for info in pkgutil.iter_modules(__path__) if info.ispkg]
    records = [importlib.import_module(f"{__name__}.{name}.traits").TRAITS for name in names]
    assert [record.name for record in records] == names, "a format is called as its folder is"
    return {record.name: record for record in sorted(records, key=lambda record: (record.name != FIRST, record.title))}


def formats() -> tuple[str, ...]:
    """The names of all formats, `FIRST` first."""
    return tuple(_found())


def traits(name: str) -> FormatTraits:
    """The record of a format.

    Raises:
        ConfigError: there is no such format.
    """
    found = _found().get(name)
    if found is None:
        raise ConfigError(
            "format", got=repr(name), expected=f"one of {', '.join(formats())}", repair="Choose one of those."
        )
    return found


def format_of_suffix(suffix: str) -> str | None:
    """The format whose files end in `suffix`, such as ``.pte``."""
    return next((name for name, record in _found().items() if record.suffix == suffix), None)


def require_packages(name: str) -> None:
    """Import nothing, and refuse a format that cannot work here.

    Raises:
        ConfigError: there is no such format.
        MissingPackageError: its packages are not installed.
    """
    record = traits(name)
    if record.extra is not None:
        require(record.distributions, record.extra)


def _module(name: str, role: str) -> Any:
    """A module of a format's folder. Raises as `require_packages`."""
    require_packages(name)
    return importlib.import_module(f"{__name__}.{name}.{role}")


def build_module(name: str) -> BuildModule:
    """What writes programs of the format. Raises as `require_packages`."""
    module: BuildModule = _module(name, "build")
    return module


def file_module(name: str) -> FileModule:
    """What reads its files. Raises as `require_packages`."""
    module: FileModule = _module(name, "file")
    return module


def description_module(name: str) -> DescriptionModule:
    """What says what is in them. Raises as `require_packages`."""
    module: DescriptionModule = _module(name, "description")
    return module


def checks_module(name: str) -> ChecksModule:
    """What holds them to the graph contract. Raises as `require_packages`."""
    module: ChecksModule = _module(name, "checks")
    return module


def runtime_module(name: str) -> RuntimeModule:
    """What runs them here; of the format's packages it needs those alone that run programs.

    Raises:
        ConfigError: there is no such format.
    """
    module: RuntimeModule = importlib.import_module(f"{__name__}.{traits(name).name}.runtime")
    return module
