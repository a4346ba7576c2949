"""The last inputs of a short causal convolution (LFM2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from exporter.kinds.base import CacheKind, MixerSpec, StateForm, StateSpec, kind_of, register


@register
class Conv(CacheKind):
    """``[L, kernel_size - 1, channels]``: the inputs of the last tokens, the newest in the last row. Every call shifts
    them along, so no row belongs to a position and nothing can be dropped."""

    name = "conv"
    label = "conv"
    line = "convolutions"
    order = 2
    roles = ("inputs",)
    listed = True
    layer_keys = frozenset({"short_conv"})

    def lost(self, spec: StateSpec, high_water: int) -> tuple[str, str]:
        return "a convolution keeps no history", "Start over with reset()."

    def writes_first(self, write_first: bool) -> bool:
        """A convolution sees the inputs before this call: its state is read first, in every program."""
        return False

    def form_of(self, layer: Mapping[str, Any]) -> StateForm | None:
        """A layer of any kind may have one beside its cache."""
        own = layer["short_conv"]
        if own is None:
            return None
        return StateForm(kind=self.name, row_shape=(own["channels"],), rows=own["kernel_size"] - 1)


class ShortConvSpec(MixerSpec):
    """A gated short causal convolution (LFM2): its state is its last ``kernel_size - 1`` inputs, no KV cache."""

    type: Literal["short_conv"] = "short_conv"
    kernel_size: int = Field(ge=2)
    bias: bool = False

    @property
    def cache_kind(self) -> CacheKind:
        return kind_of("conv")

    def forms(self, hidden_size: int) -> tuple[StateForm, ...]:
        return (StateForm(kind="conv", row_shape=(hidden_size,), rows=self.kernel_size - 1),)

    def facts(self) -> dict[str, str]:
        return {"window": str(self.kernel_size)}
