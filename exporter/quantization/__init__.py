"""Quantise a decoder in place, before it is traced, as a recipe says."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from exporter.machine import release_freed_memory
from exporter.model.decoder import Decoder, ReadParameter, all_read
from exporter.quantization import calibration, smoothing
from exporter.quantization.gptq import Gptq, stretches
from exporter.quantization.linears import quantize_linears
from exporter.quantization.modules import ExactHead, QuantizedEmbedding, QuantizedLinear
from exporter.quantization.tables import quantize_tables
from exporter.spec import HEAD, GridSpec, Recipe

__all__ = ["ExactHead", "QuantizedEmbedding", "QuantizedLinear", "quantize"]

WHOLE = 32
"""GPTQ's stretches of columns are whole numbers of so many where no weight of the model has groups."""


def quantize(
    decoder: Decoder, recipe: Recipe, passages: Sequence[torch.Tensor] = (), read: ReadParameter = all_read
) -> None:
    """Replace the modules whose weights `recipe` puts on grids by their quantised forms, and fold factors into the
    others, in place.

    What the factors and GPTQ's rounding follow is what goes through the float model over `passages`; equal weights,
    passages and numbers of threads give an equal result.

    Args:
        decoder: the float32 model; of one that is unread, one layer and one table at a time are ever in float.
        recipe: of a format whose traits say `decoder_is_rounded`.
        passages: int64 ``[1, T]`` each, of `calibration.passages`, where ``recipe.is_calibrated``.
        read: gives the parameters of an unread decoder.

    Raises:
        CheckpointError: what goes through the float model is not finite.
    """
    if not recipe.is_calibrated:
        for number, layer in enumerate(decoder.layers):
            decoder.read_part(f"layers.{number}", read)
            names = (f"layers.{number}.{name}" for site in calibration.sites(layer).values() for name in site)
            quantize_linears(decoder, recipe, names)
        decoder.read_part("norm", read)
        quantize_tables(decoder, recipe, read=read)
        return
    assert passages, "smoothing and GPTQ follow the inputs of the model"
    sites = {calibration.HEAD: (calibration.HEAD,)} | {
        f"layers.{n}.{site}": tuple(f"layers.{n}.{name}" for name in names)
        for n, layer in enumerate(decoder.layers)
        for site, names in calibration.sites(layer).items()
    }

    def kept(site: str) -> list[GridSpec]:
        """The forms of what meets this input."""
        return [recipe.part(f"{name}.weight") for name in sites[site]]

    def cuts(site: str, channels: int) -> list[int]:
        follows = any(part.gptq for part in kept(site))
        return stretches(channels, _whole(kept(site), recipe)) if follows else []

    for n, inputs in calibration.observe(decoder, passages, cuts, read):
        if n is None:
            release_freed_memory()  # of the layers' floats
            head = inputs[calibration.HEAD]
            if recipe.smooth and not recipe.is_float(HEAD):
                smoothing.fold_head(decoder, head)
            quantize_tables(decoder, recipe, Gptq(head.moments), read)
            continue
        if recipe.smooth and not all(part.is_float for site in inputs for part in kept(f"layers.{n}.{site}")):
            smoothing.fold_layer(decoder.layers[n], inputs)
        for site in calibration.sites(decoder.layers[n]):
            quantize_linears(decoder, recipe, sites[f"layers.{n}.{site}"], Gptq(inputs[site].moments))


def _whole(kept: list[GridSpec], recipe: Recipe) -> int:
    """How many columns no stretch of GPTQ may part: groups of what meets an input, or of the other weights."""
    for parts in (kept, [own.part for own in recipe.kept if own.part is not None]):
        if sizes := {part.group_size for part in parts if part.group_size is not None}:
            return math.lcm(*sizes)
    return WHOLE
