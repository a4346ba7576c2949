"""Half precision."""

from __future__ import annotations

from exporter.grids.base import Grid, Stored

GRID = Grid(name="float16", codes="float16", store=lambda weight, group_size: Stored(weight.half()))
