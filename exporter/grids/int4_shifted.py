"""int4 with a scale and a zero point a group, ``w ~ scale * (q - zero point)``, as coreai-opt rounds.

Letters: N output channels (rows), K input channels, g groups a row.
"""

from __future__ import annotations

import torch

from exporter.grids.base import Grid, Stored, row_blocks
from exporter.optional import optional


def int4_shifted_per_group(weight: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float32 ``[N, K]`` to int8 ``[N, K]`` holding -8 .. 7, float32 scales and int8 zero points ``[N, g]``.

    Each group's 16 levels cover its own range, from its smallest weight or 0 to its largest or 0. The rounding is
    coreai-opt's, to nearest and without data, asked for blocks of rows: what it takes for a whole embedding at once is
    several times the embedding's size.

    Raises:
        MissingPackageError: coreai-opt is not installed.
    """
    tools = optional("coreai_opt.coreai_utils", "coreai")
    schemes = optional("coreai_opt.coreai_utils.common", "coreai").QScheme
    kind = optional("coreai_torch._compression._types", "coreai").string_to_builtin(tools.DType.INT4)
    quantize = optional("coreai_opt.coreai_utils._utils.quantize_utils", "coreai")._compute_qparams_by_dtype
    codes = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0], weight.shape[1] // group_size)
    zero_points = torch.empty(scales.shape, dtype=torch.int8)
    for rows in row_blocks(weight):
        found = quantize(weight[rows].numpy(), kind, schemes.ASYMMETRIC, [1, group_size])
        codes[rows], scales[rows], zero_points[rows] = (torch.from_numpy(part.astype(part.dtype)) for part in found)
    return codes, scales, zero_points


def _store(weight: torch.Tensor, group_size: int | None) -> Stored:
    assert group_size is not None
    return Stored(*int4_shifted_per_group(weight, group_size))


GRID = Grid(name="int4_shifted", codes="int4", store=_store, grouped=True, zero_points="int4")
