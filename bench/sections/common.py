"""LEAF: what the sections of docs/results.md share: tables, and the figures of several machines side by side."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Run = Mapping[str, Any]
"""What one machine measured: `machine`, `date`, perhaps a `note`, and the figures."""
Row = Sequence[str]


def table(columns: Row, rows: Sequence[Row]) -> str:
    body = [f"| {' | '.join(row)} |" for row in (columns, *rows)]
    return "\n".join([body[0], "|" + "---|" * len(columns), *body[1:]])


def cell(value: float | None, show: str | Callable[[float], str]) -> str:
    """`value` in a format such as ``.2f``, or as a function writes it; empty where there is none."""
    if value is None:
        return ""
    return format(value, show) if isinstance(show, str) else show(value)


def has(row: Mapping[str, Any], *measured: str) -> bool:
    """Whether a row has all of these measurements: a run that was cut off has some."""
    return all(name in row for name in measured)


def mb(value: float) -> str:
    return f"{value / 1e6:.0f}"


def gb(value: float) -> str:
    return f"{value / 1e9:.2f}"


def provenance(runs: Sequence[Run]) -> str:
    """Date and machine of every run, and what it notes: a line for one run, a list with letters for several."""
    lines = [
        f"Measured {run['date']}: {run['machine']}." + (f" {run['note']}" if run.get("note") else "") for run in runs
    ]
    if len(lines) == 1:
        return lines[0]
    return "\n".join(f"- **{letter}**: {line}" for letter, line in zip(string.ascii_uppercase, lines, strict=False))


def side_by_side(runs: Sequence[Run], keys: int, columns: Row, rows_of: Callable[[Run], Sequence[Row]]) -> str:
    """One table of all runs.

    Args:
        keys: the first so many cells say what was measured; rows that agree in them stand together, each with the
            letter of its machine behind them when there are several runs.
        rows_of: the rows of one run.
    """
    if len(runs) == 1:
        return table(columns, rows_of(runs[0]))
    found: dict[tuple[str, ...], list[Row]] = {}
    for letter, run in zip(string.ascii_uppercase, runs, strict=False):
        for row in rows_of(run):
            found.setdefault(tuple(row[:keys]), []).append([*row[:keys], letter, *row[keys:]])
    return table([*columns[:keys], "machine", *columns[keys:]], [row for rows in found.values() for row in rows])
