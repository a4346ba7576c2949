"""The linears of the layers: which grid each one gets, and how it is rounded to it.

Letters: N output channels, K input channels, g groups a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from exporter.errors import ConfigError
from exporter.model.decoder import Decoder
from exporter.quantization import grids
from exporter.quantization.modules import QuantizedLinear
from exporter.spec import PRESETS, QuantizationSpec


class Rounding(Protocol):
    """float32 ``[N, K]`` to codes and scales."""

    def int8(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """To the grid of `grids.int8_per_row`: int8 ``[N, K]``, float32 ``[N]``."""

    def int4(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """To the grid of `grids.int4_per_group`: int8 ``[N, K]``, float32 ``[N, g]``."""


@dataclass(frozen=True)
class Nearest:
    """Every weight by itself."""

    group_size: int

    def int8(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grids.int8_per_row(weight)

    def int4(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grids.int4_per_group(weight, self.group_size)


def linear_names(decoder: Decoder, prefix: str = "layers.") -> list[str]:
    """All that are quantised of those whose names begin so: routers of experts are not, and experts' stacked weights
    are no linears."""
    return [
        name
        for name, module in decoder.named_modules()
        if isinstance(module, torch.nn.Linear) and name.startswith(prefix) and not name.endswith("router")
    ]


def grid_of(name: str, spec: QuantizationSpec) -> str:
    """none, int8 or int4."""
    return "int8" if spec.linear != "none" and any(part in name for part in spec.keep_int8) else spec.linear


def check_linears(decoder: Decoder, spec: QuantizationSpec) -> None:
    """Refuse rules that name nothing and groups that do not divide, before any work. A model need not have
    what a preset names.

    Raises:
        ConfigError: which.
    """
    if spec.linear == "none":
        return
    names = linear_names(decoder)
    for pattern in () if spec in PRESETS.values() else spec.keep_int8:
        if not any(pattern in name for name in names):
            raise ConfigError(
                "quantization.keep_int8",
                got=repr(pattern),
                expected="a part of a linear's name, such as 'down_proj' or 'layers.0.mixer.v_proj'",
                repair="Names are `layers.N.mixer.{q,k,v,o}_proj` and `layers.N.feed_forward.{gate,up,down}_proj`.",
            )
    for name in names:
        if grid_of(name, spec) == "int4":
            check_group(linear_at(decoder, name).in_features, name, spec.group_size)


def quantize_linears(decoder: Decoder, spec: QuantizationSpec, names: Sequence[str], rounding: Rounding) -> None:
    """Replace the named linears by their quantised forms."""
    for name in names:
        if (grid := grid_of(name, spec)) == "none":
            continue
        linear = linear_at(decoder, name)
        bias = None if linear.bias is None else linear.bias.detach()
        weight = linear.weight.detach()
        parent, _, own_name = name.rpartition(".")
        if grid == "int8":
            quantized = QuantizedLinear(*rounding.int8(weight), bias, None)
        else:
            quantized = QuantizedLinear(*rounding.int4(weight), bias, spec.group_size)
        setattr(decoder.get_submodule(parent), own_name, quantized)


def check_group(channels: int, name: str, group_size: int) -> None:
    """Raises ConfigError: `group_size` does not divide the input channels."""
    if channels % group_size:
        raise ConfigError(
            "quantization.group_size",
            got=f"{group_size} for {name} with {channels} input channels",
            expected="a divisor of the input channels",
            repair="Choose a smaller group_size, or int8, which has no groups.",
        )


def linear_at(module: torch.nn.Module, name: str) -> torch.nn.Linear:
    """The linear of this name below a decoder or a layer."""
    linear = module.get_submodule(name)
    assert isinstance(linear, torch.nn.Linear)
    return linear
