"""LEAF: ``coreai:`` in the YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from exporter.grids import GridName
from exporter.recipe import matrices_recipe
from exporter.spec import Recipe, ReducedWeights

if TYPE_CHECKING:
    from exporter.grids.base import Grid

WORDS = {"int4": "int4_shifted"}
"""Grids that a config calls otherwise here: Core AI's own int4 has zero points."""


class CoreAIOptions(ReducedWeights):
    """How a Core AI program keeps its weights: `int8` per output channel, `int4` per block of 32 input channels."""

    weights: GridName = "float16"

    def recipe(self, shapes: Mapping[str, tuple[int, ...]], tied: bool) -> Recipe:
        return matrices_recipe(self, shapes, tied, owner="coreai", carries=carries, scales="float32", words=WORDS)


def carries(grid: Grid) -> bool:
    """``blockwise_shift_scale`` takes integers of 4 or 8 bits, zero points like them, and float16."""
    if grid.palette is not None:
        return False
    return grid.codes == "float16" or (grid.codes in {"int8", "int4"} and grid.zero_points in {None, grid.codes})
