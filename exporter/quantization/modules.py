"""Quantised linears and embeddings.

Letters: Q query_len, N output channels, K input channels, V vocab_size, D hidden_size, g groups a row.

A quantised linear is written as the pattern XNNPACK's partitioner recognises (per-token quantise and dequantise of the
activation, dequantised constant weight, linear), over plain integer constants: nothing is left to be folded while
lowering, and eager runs the same operators as the exported program.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.ao.quantization.fx import _decomposed  # noqa: F401  registers quantized_decomposed::*
from torch.nn import functional as F

from exporter.grids.base import Stored
from exporter.grids.int4 import INT4_MAX, INT4_MIN
from exporter.grids.int8 import INT8_MAX
from exporter.spec import GridSpec

QD = torch.ops.quantized_decomposed
WEIGHTS_AT_A_TIME = 2**21
"""As many are dequantised at once by eager: the float copy of a head would be larger than the quantised model."""


class QuantizedLinear(torch.nn.Module):
    """int8 activations quantised per token at run time, times int8 (per channel) or int4 (per group) weights."""

    weight: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, group_size: int | None
    ) -> None:
        """weight int8 ``[N, K]``; scales float32 ``[N]``, or ``[N, g]`` with `group_size` given (4-bit codes)."""
        super().__init__()
        self.group_size = group_size
        self.floats: torch.Tensor | None = None
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales)
        self.register_buffer("zero_points", torch.zeros(scales.shape, dtype=torch.int64))
        self.register_buffer("bias", bias)

    @classmethod
    def of(cls, stored: Stored, bias: torch.Tensor | None, kept: GridSpec) -> QuantizedLinear:
        """Of codes that were rounded to the form `kept`."""
        assert stored.scales is not None and stored.zero_points is None, f"a linear on the grid {kept.grid}"
        scales = stored.scales[:, 0] if kept.group_size is None else stored.scales
        return cls(stored.codes, scales, bias, kept.group_size)

    def dequantized(self) -> torch.Tensor:
        """float32 ``[N, K]``."""
        return self._dequantize(self.weight, self.scales, self.zero_points)

    def _dequantize(self, weight: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor) -> torch.Tensor:
        if self.group_size is None:
            return QD.dequantize_per_channel(weight, scales, zero_points, 0, -INT8_MAX, INT8_MAX, torch.int8)
        return QD.dequantize_per_channel_group(
            weight, scales, zero_points, INT4_MIN, INT4_MAX, torch.int8, self.group_size, torch.float32
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[1, Q, K]`` to ``[1, Q, N]``."""
        scale, zero_point = QD.choose_qparams_per_token_asymmetric(x, torch.int8)
        quantized = QD.quantize_per_token(x, scale, zero_point, -128, 127, torch.int8)
        rounded = QD.dequantize_per_token(quantized, scale, zero_point, -128, 127, torch.int8, torch.float32)
        if self.floats is not None:
            return F.linear(rounded, self.floats, self.bias)
        rows = max(1, WEIGHTS_AT_A_TIME // self.weight.shape[1])
        if torch.compiler.is_exporting() or len(self.weight) <= rows:
            return F.linear(rounded, self.dequantized(), self.bias)
        parts = zip(*(part.split(rows) for part in (self.weight, self.scales, self.zero_points)), strict=True)
        outputs = torch.cat([F.linear(rounded, self._dequantize(*part)) for part in parts], -1)
        return outputs if self.bias is None else outputs + self.bias


@contextmanager
def floats_held(module: torch.nn.Module) -> Iterator[None]:
    """Inside, the quantised linears of `module` dequantise their weights once and not in every call."""
    linears = [one for one in module.modules() if isinstance(one, QuantizedLinear)]
    for linear in linears:
        linear.floats = linear.dequantized()
    try:
        yield
    finally:
        for linear in linears:
            linear.floats = None


class SplitLinear(torch.nn.Module):
    """Rows of one weight in several grids: the outputs of `parts`, one after the other."""

    def __init__(self, *parts: QuantizedLinear) -> None:
        super().__init__()
        self.parts: Sequence[QuantizedLinear] = torch.nn.ModuleList(parts)  # type: ignore[assignment]

    def dequantized(self) -> torch.Tensor:
        """float32 ``[N, K]``."""
        return torch.cat([part.dequantized() for part in self.parts])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[1, Q, K]`` to ``[1, Q, N]``."""
        return torch.cat([part(x) for part in self.parts], -1)


class QuantizedEmbedding(torch.nn.Module):
    """Rows are gathered as integers and scaled afterwards, so only Q rows are ever dequantised.

    int8: weight int8 ``[V, D]``, scales ``[V, 1]``. int4: weight uint8 ``[V, D/2]``, channel 2i in the low nibble plus
    8, channel 2i + 1 in the high one; scales ``[V, g]``. A `residual` is an int4 table of the same shape that is added.
    Scales are float32, or bfloat16 where XNNPACK keeps the same ones.
    """

    weight: torch.Tensor
    scales: torch.Tensor
    residual: QuantizedEmbedding | None

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor, residual: QuantizedEmbedding | None = None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales)
        self.residual = residual

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 ``[1, Q]`` to float32 ``[1, Q, D]``."""
        rows = F.embedding(input_ids, self.weight)
        scales = F.embedding(input_ids, self.scales).to(torch.float32)
        if self.weight.dtype == torch.int8:
            return rows.to(torch.float32) * scales
        packed = rows.to(torch.float32)
        high = torch.floor(packed * (1 / 16))  # exact in float32; no integer shift is needed from any back end
        codes = torch.stack([packed - high * 16, high], -1) - 8.0
        grouped = codes.view(1, input_ids.shape[1], scales.shape[-1], -1)
        values = (grouped * scales[..., None]).view(1, input_ids.shape[1], -1)
        return values if self.residual is None else values + self.residual(input_ids)


class SplitEmbedding(torch.nn.Module):
    """The first rows in one table, the others in a second one."""

    def __init__(self, first: QuantizedEmbedding, others: QuantizedEmbedding) -> None:
        super().__init__()
        self.first, self.others = first, others

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 ``[1, Q]`` to float32 ``[1, Q, D]``. Both tables are asked, each for a row that it has."""
        count = self.first.weight.shape[0]
        first = self.first(input_ids.clamp(max=count - 1))
        others = self.others((input_ids - count).clamp(min=0))
        return torch.where((input_ids < count)[..., None], first, others)


class ScaledEmbedding(torch.nn.Module):
    """The rows of a table, channel by channel times a factor."""

    factors: torch.Tensor

    def __init__(self, table: torch.nn.Module, factors: torch.Tensor) -> None:
        """factors float32 ``[D]``."""
        super().__init__()
        self.table = table
        self.register_buffer("factors", factors)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 ``[1, Q]`` to float32 ``[1, Q, D]``."""
        rows: torch.Tensor = self.table(input_ids)
        return rows * self.factors


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """int8 ``[V, D]`` in -8 .. 7 to uint8 ``[V, D/2]``: XNNPACK packs an int4 weight into the same bytes."""
    unsigned = (codes + 8).to(torch.uint8)
    return unsigned[:, 0::2] | (unsigned[:, 1::2] << 4)
