"""LEAF: ``executorch:`` in the YAML."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from exporter.spec import PRESETS, FormatOptions, QuantizationSpec

AttentionKernels = Literal["ring", "stock"]


class ExecutorchOptions(FormatOptions):
    """How an ExecuTorch program keeps its weights, and what it attends with.

    `quantization` is a mapping or the name of a preset. `kernels` is `ring`, the kernels of `native/`, which an app
    links, or `stock`, those that every build of ExecuTorch has. Either file runs with either, to the same results; what
    differs is who gets a prefill's attention of sliding layers, ``llama::custom_sdpa`` or XNNPACK.
    """

    quantization: QuantizationSpec = QuantizationSpec()
    kernels: AttentionKernels = "ring"

    @field_validator("quantization", mode="before")
    @classmethod
    def _preset(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value not in PRESETS:
            raise ValueError(f"one of {', '.join(PRESETS)}, or a mapping")
        return PRESETS[value]

    @property
    def rounds(self) -> bool:
        return self.quantization.is_quantized

    @property
    def decoder(self) -> QuantizationSpec:
        return self.quantization
