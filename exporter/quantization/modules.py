"""Quantised linears and embeddings.

Letters: Q query_len, N output channels, K input channels, V vocab_size, D hidden_size, g groups a row.

A quantised linear is written as the pattern XNNPACK's partitioner recognises (per-token quantise and dequantise of the
activation, dequantised constant weight, linear), over plain integer constants: nothing is left to be folded while
lowering, and eager runs the same operators as the exported program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
        if not torch.compiler.is_exporting():  # the same to the bit, and several times as fast
            grouped = weight.view(len(weight), -1, self.group_size or weight.shape[1]).to(torch.float32)
            return grouped.mul_(scales.view(len(weight), -1, 1)).view(weight.shape)
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


class QuantizedEmbedding(torch.nn.Module):
    """Rows are gathered as integers and scaled afterwards, so only Q rows are ever dequantised.

    int8: weight int8 ``[V, D]``, scales ``[V, 1]`` or ``[V, g]``. int4: weight uint8 ``[V, D/2]``, channel 2i in the
    low nibble plus 8, channel 2i + 1 in the high one; scales ``[V, g]``. Scales are of any floating dtype.
    """

    weight: torch.Tensor
    scales: torch.Tensor

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 ``[1, Q]`` to float32 ``[1, Q, D]``."""
        codes, scales = self.rows(input_ids)
        if self.weight.dtype == torch.int8:
            codes = codes.to(torch.float32)
            if scales.shape[-1] == 1:
                return codes * scales
        else:
            packed = codes.to(torch.float32)
            high = torch.floor(packed * (1 / 16))  # exact in float32; no integer shift is needed from any back end
            codes = torch.stack([packed - high * 16, high], -1) - 8.0
        grouped = codes.view(1, input_ids.shape[1], scales.shape[-1], -1)
        return (grouped * scales[..., None]).view(1, input_ids.shape[1], -1)

    def rows(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 ``[1, Q]`` to the codes of these rows ``[1, Q, ...]`` and their scales, float32."""
        return F.embedding(input_ids, self.weight), F.embedding(input_ids, self.scales).to(torch.float32)


RowsTimes = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""float32 ``[1, D]``, codes int8 ``[n, D]`` and scales float32 ``[n, g]`` to their products ``[1, n]``."""


def rows_times(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """`RowsTimes` in aten."""
    grouped = codes.to(torch.float32).view(*scales.shape, -1) * scales[..., None]
    return x @ grouped.view(codes.shape).T


class ExactHead(torch.nn.Module):
    """Logits of a head of few bits, and of the best `count` of these the products with rows of 8 bits.

    What the few bits say of the best tokens decides which they are, not how good: these are computed from float
    activations and the weights that an embedding has. All others keep the logits of the few bits, whose errors are as
    often above as below.
    """

    factors: torch.Tensor | None

    def __init__(
        self, rough: QuantizedLinear, table: QuantizedEmbedding, count: int, factors: torch.Tensor | None
    ) -> None:
        """`rough` and `table` are of the same V rows. Channel k of the input is divided by ``factors[k]`` and the
        columns of `rough` multiplied by it, those of `table` are not; None where nothing was."""
        super().__init__()
        self.rough, self.table, self.count = rough, table, count
        self.rows_times: RowsTimes = rows_times
        self.register_buffer("factors", factors)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[1, Q, D]`` to ``[1, Q, V]``. A program has Q = 1."""
        rough = self.rough(x)
        whole = x if self.factors is None else x * self.factors
        if x.shape[1] == 1:
            return self._exact(rough[0], whole[0])[None]
        return torch.stack([self._exact(*one) for one in zip(rough[0].split(1), whole[0].split(1), strict=True)], 1)

    def _exact(self, rough: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``[1, V]`` and ``[1, D]`` to ``[1, V]``."""
        best = rough.topk(self.count, -1, sorted=False).indices
        codes, scales = self.table.rows(best)
        return rough.scatter(-1, best, self.rows_times(x, codes[0], scales[0]))


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
