"""Which matrices of a model a Core ML or Core AI program keeps on which grid, and what each becomes there.

Every user of reduced weights asks here: the two back ends, which store them, and `rounding`, which says what a file
is compared with.

Letters: N output channels (rows), K input channels, g groups a row, E entries of a palette.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from exporter.errors import ConfigError
from exporter.model.decoder import Decoder
from exporter.quantization import grids
from exporter.quantization.palettes import palettize
from exporter.spec import KEEP_INT8

Grid = Literal["float16", "int8", "int4", "int4_shifted", "palettized4"]
BLOCK = 32
"""Input channels that share a scale, and in `int4_shifted` a zero point."""
LEAST_SIZE = 1024
"""Smaller matrices stay as they are: what is saved is not worth an operator."""
_GRIDS: Mapping[tuple[str, str], Grid] = {
    ("coreml", "int8"): "int8", ("coreml", "int4"): "int4", ("coreml", "palettized4"): "palettized4",
    ("coreai", "float16"): "float16", ("coreai", "int8"): "int8", ("coreai", "int4"): "int4_shifted",
}  # fmt: skip


class Storage(NamedTuple):
    """How a program keeps its weights, in the words of the config."""

    format: str
    weights: str
    keep_int8: tuple[str, ...] = ()


def grids_of(decoder: Decoder, storage: Storage) -> dict[str, Grid]:
    """The grid of every matrix that is not left alone, by its parameter's name; one that is shared has it under each.

    Matrices are the weights of linears and embeddings. Routers of experts and experts' stacked weights stay as they
    are. Where weights have 4 bits, a matrix one of whose names contains one of `keep_int8` has 8, and so has one whose
    rows are no whole number of blocks.

    Raises:
        ConfigError: `keep_int8` names nothing.
    """
    grid = _GRIDS.get((storage.format, storage.weights))
    if grid is None:
        return {}
    names: dict[int, list[str]] = {}
    weights: dict[int, torch.Tensor] = {}
    for name, module in decoder.named_modules(remove_duplicate=False):
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding) and not name.endswith("router"):
            names.setdefault(id(module.weight), []).append(name)
            weights[id(module.weight)] = module.weight
    if storage.keep_int8 != KEEP_INT8.get(storage.weights):  # the default is for models of every kind
        for pattern in storage.keep_int8:
            if not any(pattern in name for own in names.values() for name in own):
                raise ConfigError(
                    f"{storage.format}.keep_int8",
                    got=repr(pattern),
                    expected="a part of a matrix's name, such as 'down_proj', 'layers.0.mixer.v_proj' or 'lm_head'",
                    repair="Names are `embed_tokens`, `lm_head`, `layers.N.mixer.{q,k,v,o}_proj` and "
                    "`layers.N.feed_forward.{gate,up,down}_proj`.",
                )
    found: dict[str, Grid] = {}
    for key, own in names.items():
        if weights[key].numel() < LEAST_SIZE:
            continue
        kept = any(pattern in name for pattern in storage.keep_int8 for name in own)
        broken = grid in ("int4", "int4_shifted") and weights[key].shape[1] % BLOCK
        found |= {f"{name}.weight": "int8" if kept or broken else grid for name in own}
    return found


@dataclass(frozen=True)
class Stored:
    """A matrix on its grid: ``scales * (codes - zero_points)``, or the entry of the row's palette that a code names.

    codes int8, of a palette uint8, ``[N, K]``; scales float32 ``[N, g]`` and zero points int8 ``[N, g]``, each for
    K / g columns; palettes float32 ``[N, E]``.
    """

    codes: torch.Tensor
    scales: torch.Tensor | None = None
    zero_points: torch.Tensor | None = None
    palettes: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        """What it stands for, float32 ``[N, K]``."""
        if self.palettes is not None:
            return self.palettes.gather(1, self.codes.long())
        assert self.scales is not None
        groups = self.codes.view(*self.scales.shape, -1)
        if self.zero_points is not None:
            groups = groups - self.zero_points[..., None]
        return (groups * self.scales[..., None]).view(self.codes.shape)


def store(weight: torch.Tensor, grid: Grid) -> Stored:
    """float32 ``[N, K]`` on a grid of integers or on palettes.

    Raises:
        MissingPackageError: `int4_shifted` without coreai-opt.
    """
    if grid == "int8":
        codes, scales = grids.int8_per_row(weight)
        return Stored(codes, scales[:, None])
    if grid == "int4":
        return Stored(*grids.int4_per_group(weight, BLOCK))
    if grid == "int4_shifted":
        return Stored(*grids.int4_shifted_per_group(weight, BLOCK))
    assert grid == "palettized4", f"{grid} is no grid of integers"
    codes, palettes = palettize(weight)
    return Stored(codes, palettes=palettes)
