"""What matrices are kept as. A grid is one file here, found by its name; what it takes to add one is in `base`.

Imports no torch: a config asks for names, and a bad one should not wait for torch.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator

if TYPE_CHECKING:
    from exporter.grids.base import Grid


def names() -> tuple[str, ...]:
    """Of all grids."""
    return tuple(info.name for info in pkgutil.iter_modules(__path__) if info.name != "base")


def known(name: str) -> str:
    """`name`, if it is a grid's; for validators. Raises ValueError."""
    if name not in names():
        raise ValueError(f"one of {', '.join(names())}")
    return name


GridName = Annotated[str, AfterValidator(known)]


def grid(name: str) -> Grid:
    """The record of a grid; there must be one."""
    found: Grid = importlib.import_module(f"{__name__}.{name}").GRID
    assert found.name == name, "a grid is called as its file is"
    return found
