"""The weights as they are."""

from __future__ import annotations

from exporter.grids.base import Grid, Stored

GRID = Grid(name="float32", codes="float32", store=lambda weight, group_size: Stored(weight))
