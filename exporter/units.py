"""LEAF: sizes in words. Binary and decimal units are told apart everywhere: 1 GiB = 2^30, 1 GB = 10^9 bytes."""

from __future__ import annotations

Units = tuple[tuple[str, int], ...]
BINARY: Units = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
DECIMAL: Units = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3))
BYTES: dict[str, int] = dict((*BINARY, *DECIMAL))
"""Of every unit."""


def size(count: float, units: Units, digits: int = 2) -> str:
    """`count` bytes in the largest unit of which there is at least one: ``"1.12 GiB"``."""
    for name, unit in units:
        if count >= unit:
            return f"{count / unit:,.{digits}f} {name}"
    return f"{count:.0f} B"


def amount(count: float, unit: str, digits: int = 2) -> str:
    """`count` bytes as a number of one unit, for a column that names it: ``"1.50"``."""
    return f"{count / BYTES[unit]:.{digits}f}"


def in_unit(count: float, unit: str, digits: int = 2) -> str:
    """`count` bytes in one unit, whatever their number: ``"1.50 MiB"``."""
    return f"{amount(count, unit, digits)} {unit}"
