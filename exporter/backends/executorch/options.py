"""LEAF: ``executorch:`` in the YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import field_validator

from exporter.grids import names
from exporter.recipe import decoder_recipe
from exporter.spec import (
    HEAD,
    PRESETS,
    QUALITY_PROMISES,
    FormatOptions,
    Promise,
    QuantizationSpec,
    Recipe,
    nearest_preset,
    promise_of,
)

if TYPE_CHECKING:
    from exporter.grids.base import Grid

AttentionKernels = Literal["ring", "stock"]


class ExecutorchOptions(FormatOptions):
    """How an ExecuTorch program keeps its weights, and what it attends with.

    `quantization` is a mapping or the name of a preset. `kernels` is `ring`, the kernels of `native/`, which an app
    links, or `stock`, those that every build of ExecuTorch has. Either file runs on either kernels, up to rounding.
    They differ in a prefill's attention of sliding layers: ``llama::custom_sdpa`` or XNNPACK.
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

    @field_validator("quantization")
    @classmethod
    def _grids_are_known(cls, value: QuantizationSpec) -> QuantizationSpec:
        words = ("none", *(name for name in names() if not name.startswith("float")))
        for key in ("linear", "embedding", "head"):
            if getattr(value, key) not in words:
                raise ValueError(f"{key} one of {', '.join(words)}")
        return value

    @property
    def promise(self) -> Promise:
        return promise_of(self.quantization)

    @property
    def stated_max_kl(self) -> float | None:
        return self.quantization.max_kl_divergence

    @property
    def preset(self) -> str | None:
        name = nearest_preset(self.quantization)
        return name if name in QUALITY_PROMISES else None

    def with_preset(self, name: str) -> Self:
        return self.model_copy(update={"quantization": PRESETS[name]})

    def recipe(self, shapes: Mapping[str, tuple[int, ...]], tied: bool) -> Recipe:
        return decoder_recipe(
            self.quantization, shapes, tied, owner="executorch.quantization", carries=carries, scales=scales
        )

    def described(self, recipe: Recipe) -> str:
        """With the average bits a weight."""
        if recipe.is_float32:
            return "float32"
        rules, bits = self.quantization, recipe.weight_bits
        head = f"head {rules.head}"
        if (exact := recipe[HEAD].exact) is not None:
            head += f" with {exact.count} exact rows"
        kinds = [f"linear {rules.linear}", f"embedding {rules.embedding}", head]
        kinds += ["smoothed"] * rules.smooth + ["gptq"] * (rules.rounding == "gptq")
        return f"{', '.join(kinds)}; {bits.read:.2f} bits a weight read for a token, {bits.stored:.2f} stored"


def carries(grid: Grid) -> bool:
    """XNNPACK multiplies integers without zero points: 8 bits with a scale a row, or 4 with a scale a group."""
    if grid.zero_points is not None or grid.palette is not None:
        return False
    return (grid.codes, grid.grouped) in {("int8", False), ("int4", True)}


def scales(grid: Grid) -> str:
    """The dtype in which XNNPACK keeps them, and a table that it does not multiply."""
    if not carries(grid):
        return "float16"
    return "bfloat16" if grid.grouped else "float32"
