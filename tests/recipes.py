"""Recipes of tiny models, and decoders quantised by the rules of a config."""

from __future__ import annotations

from typing import Any

import torch

from exporter.backends.executorch.options import ExecutorchOptions
from exporter.model.decoder import Decoder, parameter_shapes
from exporter.quantization import quantize
from exporter.spec import FormatOptions, ModelSpec, QuantizationSpec, Recipe


def recipe_of(spec: ModelSpec, rules: QuantizationSpec | FormatOptions) -> Recipe:
    """What the options of a format come to for a model; rules alone are ExecuTorch's."""
    options = ExecutorchOptions(quantization=rules) if isinstance(rules, QuantizationSpec) else rules
    return options.recipe(parameter_shapes(spec), spec.tie_word_embeddings)


def quantize_by(rules: QuantizationSpec, decoder: Decoder, ids: torch.Tensor | None = None, *rest: Any) -> None:
    """`quantize` with the recipe of `rules`, calibrated on the one passage `ids`."""
    quantize(decoder, recipe_of(decoder.spec, rules), [] if ids is None else [ids], *rest)
