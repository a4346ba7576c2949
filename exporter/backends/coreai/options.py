"""LEAF: ``coreai:`` in the YAML."""

from __future__ import annotations

from typing import Literal

from exporter.spec import ReducedWeights


class CoreAIOptions(ReducedWeights):
    """How a Core AI program keeps its weights: `int8` per output channel, `int4` per block of 32 input channels."""

    weights: Literal["float32", "float16", "int8", "int4"] = "float16"
