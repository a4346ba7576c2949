"""LEAF: ``coreml:`` in the YAML."""

from __future__ import annotations

from typing import Literal

from exporter.spec import ReducedWeights


class CoreMLOptions(ReducedWeights):
    """How a Core ML program keeps its weights: `int8` per output channel, `int4` per block of 32 input channels,
    `palettized4` as 4-bit indices into a table. ``float32`` computes in float32 too, for comparisons; its states are
    float16 all the same."""

    weights: Literal["float32", "float16", "int8", "int4", "palettized4"] = "float16"
