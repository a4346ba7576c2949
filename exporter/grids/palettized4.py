"""4-bit palettes by one-dimensional k-means, one for every row.

Letters: N rows, K columns, E entries of a palette.
"""

from __future__ import annotations

import torch

from exporter.grids.base import Grid, Stored

ENTRIES = 16
STEPS = 8
QUANTILES = 0.7
"""Of the start; the rest is equal spacing. Quantiles alone starve the tails: thrice the steps, and worse after them."""
ELEMENTS_AT_A_TIME = 2**21


def palettize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[N, K]`` to indices uint8 ``[N, K]`` in 0 .. 15 and palettes float32 ``[N, E]`` in ascending order, each value
    one that float16 has.

    A palette for every row: shared by 16 rows, whose weights differ in size, it costs Gemma 3 270M twice the divergence
    (docs/coreml.md). An entry that loses all its weights stays where it is.
    """
    rows, columns = weight.shape
    indices = torch.empty(weight.shape, dtype=torch.uint8)
    palettes = torch.empty(rows, ENTRIES)
    step = max(1, ELEMENTS_AT_A_TIME // columns)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        palettes[part], indices[part] = _cluster(weight[part].float())
    return indices, palettes


def _cluster(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Lloyd's iteration on every row of ``[N, K]`` by itself: palettes ``[N, E]`` and indices ``[N, K]``."""
    sample = values[:, :: max(1, values.shape[1] // 4096)].sort(1).values
    parts = (torch.arange(ENTRIES) + 0.5) / ENTRIES
    quantiles = sample[:, (parts * sample.shape[1]).long()]
    spaced = sample[:, :1] + (sample[:, -1:] - sample[:, :1]) * parts
    centres = QUANTILES * quantiles + (1 - QUANTILES) * spaced
    ones = torch.ones_like(values)
    for _ in range(STEPS):
        nearest = _nearest(values, centres)
        sums = torch.zeros_like(centres).scatter_add_(1, nearest, values)
        counts = torch.zeros_like(centres).scatter_add_(1, nearest, ones)
        centres = torch.where(counts > 0, sums / counts.clamp(min=1), centres).sort(1).values
    # As they will be stored.
    centres = centres.half().float()
    return centres, _nearest(values, centres).to(torch.uint8)


def _nearest(values: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
    """int64 ``[N, K]``: between two neighbours in ascending order, the middle decides."""
    return torch.searchsorted((centres[:, 1:] + centres[:, :-1]) / 2, values)


def _store(weight: torch.Tensor, group_size: int | None) -> Stored:
    codes, palettes = palettize(weight)
    return Stored(codes, palettes=palettes)


GRID = Grid(name="palettized4", codes="uint4", store=_store, palette=ENTRIES)
