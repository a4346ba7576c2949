"""The values that stored weights stand for, as a float model: what a file with reduced weights is compared with."""

from __future__ import annotations

import torch

from exporter.grids.base import store
from exporter.model.decoder import Decoder
from exporter.spec import Recipe


def round_weights(decoder: Decoder, recipe: Recipe) -> None:
    """Replace every matrix that the recipe puts on a grid of integers or palettes by what is left of it, in place; a
    tied one stays tied. Weights and arithmetic stay float32.

    Raises:
        MissingPackageError: `int4_shifted` without coreai-opt.
    """
    values: dict[int, torch.nn.Parameter] = {}
    for name in recipe.rounded:
        module = decoder.get_submodule(name.removesuffix(".weight"))
        weight = module.weight
        assert isinstance(weight, torch.nn.Parameter)
        if id(weight) not in values:
            stored = store(weight.detach(), recipe.part(name))
            values[id(weight)] = torch.nn.Parameter(stored.values(), requires_grad=False)
        module.weight = values[id(weight)]
