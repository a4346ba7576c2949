"""Integer grids for weights.

Letters: N output channels (rows), K input channels, g groups a row. Grids are symmetric, ``w ~ scale * q``, but for the
one that says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from exporter.optional import optional

INT8_MAX = 127
INT4_MIN, INT4_MAX = -8, 7
SEARCH_STEPS = 24
ELEMENTS_AT_A_TIME = 2**17  # temporaries stay in the cache, and a 262,144-row embedding needs no second copy


def int8_per_row(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 ``[N, K]`` to int8 ``[N, K]`` in -127 .. 127 and float32 scales ``[N]``: ``scale = max|w| / 127``."""
    scales = int8_scales(weight)
    quantized = torch.empty(weight.shape, dtype=torch.int8)
    for rows in row_blocks(weight):
        quantized[rows] = (weight[rows] / scales[rows, None]).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
    return quantized, scales


def int8_scales(weight: torch.Tensor) -> torch.Tensor:
    """float32 ``[N]``, ``max|w| / 127`` of every row."""
    largest = torch.cat([weight[rows].abs().amax(1) for rows in row_blocks(weight)])
    return (largest / INT8_MAX).clamp(min=torch.finfo(torch.float32).tiny)


def int4_per_group(weight: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 ``[N, K]`` to int8 ``[N, K]`` holding -8 .. 7 and float32 scales ``[N, g]``, g = K / group_size.

    Each group takes the scale of least squared error among `SEARCH_STEPS` from ``max|w| / 8.9`` to ``max|w| / 5.9``:
    clipping the largest weight often pays. Scales are rounded to bfloat16, which is how XNNPACK stores them, before
    the error is measured, so that eager and the delegate share one grid.
    """
    quantized = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0], weight.shape[1] // group_size)
    for rows in row_blocks(weight):
        grouped = weight[rows].reshape(-1, weight.shape[1] // group_size, group_size)
        best_q, best_scale = _least_squares_scale(grouped)
        quantized[rows], scales[rows] = best_q.reshape(weight[rows].shape), best_scale
    return quantized, scales


def int4_shifted_per_group(weight: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float32 ``[N, K]`` to int8 ``[N, K]`` holding -8 .. 7, float32 scales and int8 zero points ``[N, g]``.

    ``w ~ scale * (q - zero point)``: each group's 16 levels cover its own range, from its smallest weight or 0 to its
    largest or 0. The rounding is coreai-opt's, to nearest and without data, asked for blocks of rows: what it takes for
    a whole embedding at once is several times the embedding's size.

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


def _least_squares_scale(grouped: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[n, g, group_size]`` to its int8 codes and scales ``[n, g]``."""
    largest = grouped.abs().amax(-1, keepdim=True)
    tiny = torch.finfo(torch.bfloat16).tiny
    best_error = torch.full(largest.shape, torch.inf)
    best_scale = torch.full(largest.shape, tiny)
    for divisor in torch.linspace(5.9, 8.9, SEARCH_STEPS).tolist():
        scale = (largest / divisor).to(torch.bfloat16).float().clamp_(min=tiny)
        codes = (grouped / scale).round_().clamp_(INT4_MIN, INT4_MAX)
        error = codes.mul_(scale).sub_(grouped).square_().sum(-1, keepdim=True)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
    codes = (grouped / best_scale).round_().clamp_(INT4_MIN, INT4_MAX)
    return codes.to(torch.int8), best_scale[..., 0]
