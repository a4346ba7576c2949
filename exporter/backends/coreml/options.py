"""LEAF: ``coreml:`` in the YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from exporter.grids import GridName
from exporter.recipe import FLOAT32, matrices_recipe
from exporter.spec import GridSpec, Recipe, ReducedWeights

if TYPE_CHECKING:
    from exporter.grids.base import Grid

FLOAT16 = GridSpec(grid="float16", codes="float16")


class CoreMLOptions(ReducedWeights):
    """How a Core ML program keeps its weights: `int8` per output channel, `int4` per block of 32 input channels,
    `palettized4` as 4-bit indices into a table. ``float32`` computes in float32 too, for comparisons; its states are
    float16 all the same."""

    weights: GridName = "float16"

    def recipe(self, shapes: Mapping[str, tuple[int, ...]], tied: bool) -> Recipe:
        return matrices_recipe(
            self, shapes, tied, owner="coreml", carries=carries, scales="float16", floats=self._float
        )

    def _float(self, name: str) -> GridSpec:
        """Of a parameter that is left alone: norms compute in float32 in any case (`precision`)."""
        return FLOAT32 if self.weights == "float32" or "norm" in name else FLOAT16


def carries(grid: Grid) -> bool:
    """Operators expand integers of 4 or 8 bits without zero points, and indices into palettes of 2, 4, 16 or 64."""
    if grid.palette is not None:
        return grid.codes in {"uint1", "uint2", "uint4", "uint6"}
    return grid.codes == "float16" or (grid.codes in {"int8", "int4"} and grid.zero_points is None)
