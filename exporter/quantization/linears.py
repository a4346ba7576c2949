"""The linears of the layers, each rounded to the form that the recipe gives its weight."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from exporter.grids.base import Stored, store
from exporter.model.decoder import Decoder
from exporter.quantization.gptq import Gptq
from exporter.quantization.modules import QuantizedLinear
from exporter.spec import GridSpec, Recipe


def rounded(weight: torch.Tensor, kept: GridSpec, gptq: Gptq | None) -> Stored:
    """float32 ``[N, K]`` in the form `kept`; where it asks for GPTQ, `gptq` knows the inputs that the weight meets."""
    if not kept.gptq:
        return store(weight, kept)
    assert gptq is not None, "GPTQ follows the inputs"
    return gptq.store(weight, kept)


def quantize_linears(decoder: Decoder, recipe: Recipe, names: Iterable[str], gptq: Gptq | None = None) -> None:
    """Replace the linears of these names by their quantised forms; what the recipe leaves in floats stays."""
    for name in names:
        kept = recipe.part(f"{name}.weight")
        if kept.is_float:
            continue
        linear = linear_at(decoder, name)
        bias = None if linear.bias is None else linear.bias.detach()
        parent, _, own_name = name.rpartition(".")
        quantized = QuantizedLinear.of(rounded(linear.weight.detach(), kept, gptq), bias, kept)
        setattr(decoder.get_submodule(parent), own_name, quantized)


def linear_at(module: torch.nn.Module, name: str) -> torch.nn.Linear:
    """The linear of this name below a decoder or a layer."""
    linear = module.get_submodule(name)
    assert isinstance(linear, torch.nn.Linear)
    return linear
