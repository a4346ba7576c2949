"""4-bit palettes by one-dimensional k-means.

Letters: N rows, K columns, R rows that share a palette, G = N / R palettes, E entries of a palette.
"""

from __future__ import annotations

import torch

ENTRIES = 16
ROWS_PER_PALETTE = 16
STEPS = 8
QUANTILES = 0.7
"""Of the start; the rest is equal spacing. Quantiles alone starve the tails: thrice the steps, and worse after them."""
ELEMENTS_AT_A_TIME = 2**21


def palettize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[N, K]`` to indices uint8 ``[N, K]`` in 0 .. 15 and palettes float32 ``[G, E]`` in ascending order.

    Each `ROWS_PER_PALETTE` rows share a palette, all rows if N is no multiple of that. An entry that loses all its
    weights stays where it is.
    """
    rows, columns = weight.shape
    shared = ROWS_PER_PALETTE if rows % ROWS_PER_PALETTE == 0 else rows
    groups = weight.reshape(rows // shared, shared * columns)
    indices = torch.empty(groups.shape, dtype=torch.uint8)
    palettes = torch.empty(groups.shape[0], ENTRIES)
    step = max(1, ELEMENTS_AT_A_TIME // groups.shape[1])
    for start in range(0, groups.shape[0], step):
        part = slice(start, start + step)
        palettes[part], indices[part] = _cluster(groups[part].float())
    return indices.reshape(weight.shape), palettes


def _cluster(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Lloyd's iteration on every row of ``[G, R * K]`` by itself: palettes ``[G, E]`` and indices."""
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
    """int64 ``[G, R * K]``: between two neighbours in ascending order, the middle decides."""
    return torch.searchsorted((centres[:, 1:] + centres[:, :-1]) / 2, values)
