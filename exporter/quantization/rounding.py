"""The values that stored weights stand for, as a float model: what a file with reduced weights is compared with."""

from __future__ import annotations

import torch

from exporter.model.decoder import Decoder
from exporter.quantization.matrices import Storage, grids_of, store


def round_weights(decoder: Decoder, storage: Storage) -> None:
    """Replace every matrix that a program of `storage` reduces by what is left of it, in place; a tied one stays tied.
    Weights and arithmetic stay float32.

    Raises:
        ConfigError: `keep_int8` names nothing.
        MissingPackageError: Core AI's int4 without coreai-opt.
    """
    rounded: dict[int, torch.nn.Parameter] = {}
    for name, grid in grids_of(decoder, storage).items():
        module = decoder.get_submodule(name.removesuffix(".weight"))
        weight = module.weight
        assert isinstance(weight, torch.nn.Parameter)
        if id(weight) not in rounded:
            rounded[id(weight)] = torch.nn.Parameter(store(weight.detach(), grid).values(), requires_grad=False)
        module.weight = rounded[id(weight)]
