"""From a decoder to a checked `.aimodel`, laid out as Apple's language bundles are."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from torch.export import ExportedProgram

from exporter.backends.base import Built, Step, program_spec
from exporter.backends.coreai.checks import check_asset
from exporter.backends.coreai.convert import convert
from exporter.backends.coreai.description import describe
from exporter.backends.coreai.file import Asset
from exporter.backends.coreai.options import CoreAIOptions
from exporter.backends.coreai.ranges import record_ranges
from exporter.backends.coreai.traits import TRAITS
from exporter.cache.interface import CacheKernels
from exporter.cache.plain import PlainKernels
from exporter.graph import ProgramContract, refuse_failed
from exporter.graph.checks_export import as_traced, dynamic_ranges, finite_constants
from exporter.graph.fx_flow import flow_of
from exporter.graph.provenance import Trace
from exporter.model.decoder import Decoder
from exporter.programs import Limits, method_spec, trace
from exporter.room import require_room
from exporter.spec import MAIN, PREFILL, PROGRAMS, CacheKind, CheckResult, Manifest, Recipe
from exporter.units import in_unit

METADATA_FILE = "metadata.json"


def kernels(options: CoreAIOptions) -> CacheKernels:
    return PlainKernels()


def build(
    decoder: Decoder, limits: Limits, options: CoreAIOptions, recipe: Recipe, *, directory: Path, step: Step
) -> Built:
    """See `BuildModule.build`.

    Raises:
        MissingPackageError: Core AI's packages are not installed.
        UnsupportedModelError: the converter lacks an operator of the model.
        GraphContractError: a check failed.
    """
    contracts = {
        name: ProgramContract(name, method_spec(decoder, kind, limits, TRAITS.ids_dtype), decoder.states)
        for name, kind in PROGRAMS.items()
    }
    with step("trace for Core AI"):
        programs = {name: trace(decoder, kind, limits, TRAITS.ids_dtype) for name, kind in PROGRAMS.items()}
        checks = check_traced(programs, contracts)
    with step("convert to Core AI") as detail, contextlib.redirect_stdout(io.StringIO()):
        program = convert(programs, {method: own.interface for method, own in contracts.items()}, recipe)
        require_room(directory, recipe.stored_bytes)
        record_ranges(program.save_asset(directory / TRAITS.file), contracts.values())
        del program, programs
        size = sum(file.stat().st_size for file in (directory / TRAITS.file).iterdir())
        detail(in_unit(size, "MB", 0))
    with step("check Core AI program") as detail:
        asset = Asset(directory / TRAITS.file)
        lowered = check_asset(asset, list(contracts.values()))
        refuse_failed(lowered)
        detail(f"{len(lowered)} checks passed")
    operators = {name for function in describe(asset).functions for name in function.operators}
    methods = {method: own.interface for method, own in contracts.items()}
    spec = program_spec(
        TRAITS,
        options,
        recipe,
        decoder.states,
        methods,
        runtime=f"coreai-core-{version('coreai-core')}-interpreter",
        operators=operators,
    )
    return Built(spec, (*checks, *lowered))


def check_traced(
    programs: Mapping[str, ExportedProgram], contracts: Mapping[str, ProgramContract]
) -> list[CheckResult]:
    """Check what only the traced programs show: the asset does not record the ranges of dynamic axes, and its large
    constants are not read.

    Raises:
        GraphContractError: a check failed.
    """
    results = []
    for method, contract in contracts.items():
        # Where writes go is checked on the asset: over stacks, every traced node lies between a state and itself.
        flow = flow_of(programs[method], contract.input_names, positions=False)
        results.append(dynamic_ranges(programs[method], flow, Trace(flow), contract))
        results.append(finite_constants(programs[method], flow, contract))
    refuse_failed(results)
    return as_traced(results)


def apples_word(kind: CacheKind) -> str:
    """The kind of a state in Apple's metadata. A ``fixed`` state forbids rewinding to a shorter conversation."""
    if kind.grows:
        return "kv_cache"
    return "sliding_cache" if kind.rewinds else "fixed"


def beside(manifest: Manifest) -> dict[str, str]:
    """Apple's `metadata.json`; its runtime finds `tokenizer/` beside it."""
    metadata = {
        "metadata_version": "0.2",
        "kind": "llm",
        "name": manifest.name,
        "assets": {"main": manifest.program.file},
        "language": {
            "tokenizer": "tokenizer",
            "embedded_tokenizer": True,
            "vocab_size": manifest.model.vocab_size,
            "max_context_length": manifest.max_context_length,
            "function_map": {"main": [MAIN.name], "prompt": [PREFILL.name]},
            "states": {state.name: apples_word(state.cache_kind) for state in manifest.states},
        },
    }
    return {METADATA_FILE: json.dumps(metadata, indent=2) + "\n"}
