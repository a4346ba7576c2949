"""Core ML packages of tiny random models, each built once a session by the back end itself."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Literal

from recipes import recipe_of
from tiny_models import SPECS, randomize

from exporter.backends import Built
from exporter.backends.coreml.build import build, interface_of, kernels
from exporter.backends.coreml.options import CoreMLOptions
from exporter.backends.coreml.traits import TRAITS
from exporter.graph.contract import ProgramContract
from exporter.model.decoder import Decoder
from exporter.programs import Limits
from exporter.progress import Progress
from exporter.spec import PROGRAMS, CachePolicy, ModelSpec, state_specs

CONTEXT, CHUNK = 96, 40  # chunks are up to five times the window
LIMITS = Limits(max_context_length=CONTEXT, max_prefill_chunk=CHUNK)
Weights = Literal["float32", "float16", "int8", "int4", "palettized4"]


def coreml_decoder(spec: ModelSpec, *, slack: int = 0) -> Decoder:
    """The float32 model over Core ML's states."""
    states = state_specs(spec, CachePolicy(ring_slack=slack), CONTEXT, "static", "float16")
    return randomize(Decoder(spec, states, kernels(CoreMLOptions())))


@cache
def built(
    name: str, weights: Weights = "float16", slack: int = 0, keep_int8: tuple[str, ...] = ()
) -> tuple[Decoder, Built, Path]:
    """The float32 model, what the back end says it built, and the package."""
    directory = Path(mkdtemp(prefix="coreml"))
    decoder = coreml_decoder(SPECS[name], slack=slack)
    options = CoreMLOptions(weights=weights, keep_int8=keep_int8)
    recipe = recipe_of(decoder.spec, options)
    result = build(decoder, LIMITS, options, recipe, directory=directory, step=Progress.silent().step)
    return decoder, result, directory / TRAITS.file


def contracts_of(decoder: Decoder) -> list[ProgramContract]:
    return [
        ProgramContract(name, interface_of(decoder, kind, LIMITS), decoder.states) for name, kind in PROGRAMS.items()
    ]
