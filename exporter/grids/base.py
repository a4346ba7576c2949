"""What a grid is. Its file has one record, ``GRID``, and the arithmetic of its rounding.

A program can have it where the format carries its kind of codes (`carries` in the options of a format): the name is
then a word for the config, and the recipe, the manifest, bits and bytes follow from the record.

Letters: N output channels (rows), K input channels, g groups a row, G group_size, E entries of a palette.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from exporter.grids import grid
from exporter.spec import GridSpec

ELEMENTS_AT_A_TIME = 2**17  # temporaries stay in the cache, and a 262,144-row embedding needs no second copy


@dataclass(frozen=True)
class Stored:
    """A matrix on its grid: ``scales * (codes - zero_points)``, or the entry of the row's palette that a code names; on
    a float grid the codes themselves.

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
        if self.scales is None:
            return self.codes.float()
        groups = self.codes.view(*self.scales.shape, -1)
        if self.zero_points is not None:
            groups = groups - self.zero_points[..., None]
        return (groups * self.scales[..., None]).view(self.codes.shape)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """How GPTQ goes to a grid without zero points, column by column.

    Args:
        limits: of a code, both included.
        of_rows: ``[N, K]`` to the scales ``[N]``, which no later column changes; for grids with a scale a row.
        of_group: ``[G, n]`` columns that are due and the cost of a squared error in each of them ``[G]`` to the scales
            ``[n]``; for grids with a scale a group.
    """

    limits: tuple[int, int]
    of_rows: Callable[[torch.Tensor], torch.Tensor] | None = None
    of_group: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class Grid:
    """One way of keeping a matrix.

    Args:
        name: in configs and manifests; the file's name.
        codes: dtype of what a program stores for a weight. A narrower code may stand in a wider dtype.
        store: float32 ``[N, K]`` and the group_size of a grid that has groups, to each weight's nearest code.
        grouped: whether scales are those of groups of columns; otherwise of rows.
        zero_points: dtype of a zero point beside each scale.
        palette: entries a row chooses from; there are no scales then.
        steps: how GPTQ rounds to it; None where it cannot, and weights go to their nearest codes.
    """

    name: str
    codes: str
    store: Callable[[torch.Tensor, int | None], Stored]
    grouped: bool = False
    zero_points: str | None = None
    palette: int | None = None
    steps: Steps | None = None

    def fits(self, shape: tuple[int, ...], group_size: int) -> bool:
        """Whether rows of ``[N, K]`` are whole numbers of groups."""
        return not self.grouped or shape[-1] % group_size == 0

    def spec(self, *, group_size: int, scales: str, gptq: bool = False) -> GridSpec:
        """This form in a program, for its recipe.

        Args:
            group_size: of a grid that has groups.
            scales: the dtype in which the format keeps scales, or a palette's entries.
            gptq: whether rounding is to follow the inputs, where it can.
        """
        is_float = self.codes.startswith("float")
        return GridSpec(
            grid=self.name,
            codes=self.codes,
            group_size=group_size if self.grouped else None,
            scales=None if is_float else scales,
            zero_points=self.zero_points,
            palette=self.palette,
            gptq=gptq and self.steps is not None,
        )


def store(weight: torch.Tensor, kept: GridSpec) -> Stored:
    """float32 ``[N, K]`` in the form `kept`, each weight rounded by itself.

    Raises:
        MissingPackageError: `int4_shifted` without coreai-opt.
    """
    return grid(kept.grid).store(weight, kept.group_size)


def row_blocks(weight: torch.Tensor, rows_at_a_time: int | None = None) -> Iterator[slice]:
    """Blocks of rows, by default of `ELEMENTS_AT_A_TIME`, each worked on by one thread: thousands of small operators
    would each wait for the second one whenever the machine is busy (a hundredfold slow-down was measured)."""
    step = rows_at_a_time or max(1, ELEMENTS_AT_A_TIME // weight.shape[1])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from (slice(start, start + step) for start in range(0, weight.shape[0], step))
    finally:
        torch.set_num_threads(threads)
