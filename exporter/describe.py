"""What a program file says of itself, whatever its format: the tables of ``exporter inspect FILE``."""

from __future__ import annotations

from dataclasses import dataclass

Row = tuple[str, str, str]
"""Name, dtype, shape; a dynamic dimension is shown as its range, ``1..512``."""


@dataclass(frozen=True)
class FunctionDescription:
    """One function of a file; `operators` counts its operators by name. `planned_bytes` is the memory that the file
    plans for activations and outputs, where it does."""

    name: str
    inputs: tuple[Row, ...]
    states: tuple[Row, ...]
    outputs: tuple[Row, ...]
    operators: dict[str, int]
    planned_bytes: int | None = None


@dataclass(frozen=True)
class FileDescription:
    """A program file; `weight_bytes` are what its constants take, by precision or by use."""

    file: str
    format: str
    functions: tuple[FunctionDescription, ...]
    weight_bytes: dict[str, int]
    file_bytes: int
