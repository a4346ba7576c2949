"""From a decoder to a checked `.aimodel`, laid out as Apple's language bundles are."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from torch.export import ExportedProgram

from exporter.backends import Built, Step
from exporter.backends.coreai.checks import check_file
from exporter.backends.coreai.convert import convert
from exporter.backends.coreai.description import describe
from exporter.backends.coreai.program import Asset
from exporter.backends.coreai.ranges import record_ranges
from exporter.cache.interface import CacheKernels
from exporter.cache.plain import PlainKernels
from exporter.graph import ProgramContract, refuse_failed
from exporter.graph.checks_export import dynamic_ranges, finite_constants
from exporter.graph.fx_flow import flow_of
from exporter.graph.provenance import Trace
from exporter.model.decoder import Decoder
from exporter.programs import METHODS, Limits, Method, method_spec, trace
from exporter.quantization.matrices import Storage, grids_of
from exporter.spec import IDS_DTYPES, CheckResult, CoreAIOptions, Manifest, ProgramSpec

PROGRAM_FILE = "model.aimodel"
METADATA_FILE = "metadata.json"
VERSIONS = ("coreai-core", "coreai-torch", "coreai-opt")
IDS_DTYPE = IDS_DTYPES["coreai"]
STATE_KINDS = {"full": "kv_cache", "ring": "sliding_cache", "conv": "fixed"}
"""What Apple's metadata calls a state. A ``fixed`` one turns off going back to a shorter conversation."""


def kernels(options: CoreAIOptions) -> CacheKernels:
    return PlainKernels()


def build(decoder: Decoder, limits: Limits, options: CoreAIOptions, directory: Path, step: Step) -> Built:
    """See `Backend.build`.

    Raises:
        MissingPackageError: Core AI's packages are not installed.
        UnsupportedModelError: the converter lacks an operator of the model.
        GraphContractError: a check failed.
    """
    contracts = {
        method: ProgramContract(method, method_spec(decoder, method, limits, IDS_DTYPE), decoder.states)
        for method in METHODS
    }
    grids = grids_of(decoder, Storage("coreai", options.weights, options.keep_int8))
    with step("trace for Core AI"):
        programs = {method: trace(decoder, method, limits, IDS_DTYPE) for method in METHODS}
        checks = check_traced(programs, contracts)
    with step("convert to Core AI") as detail, contextlib.redirect_stdout(io.StringIO()):
        program = convert(programs, {method: own.interface for method, own in contracts.items()}, grids)
        record_ranges(program.save_asset(directory / PROGRAM_FILE), contracts.values())
        del program, programs
        size = sum(file.stat().st_size for file in (directory / PROGRAM_FILE).iterdir())
        detail(f"{size / 1e6:.0f} MB")
    with step("check Core AI program") as detail:
        asset = Asset(directory / PROGRAM_FILE)
        lowered = check_file(asset, list(contracts.values()))
        refuse_failed(lowered)
        detail(f"{len(lowered)} checks passed")
    operators = {name for function in describe(asset).functions for name in function.operators}
    spec = ProgramSpec(
        format="coreai",
        file=PROGRAM_FILE,
        weights=options.weights,
        keep_int8=options.keep_int8,
        max_kl_divergence=options.max_kl_divergence,
        states=decoder.states,
        methods={method: own.interface for method, own in contracts.items()},
        runtime=f"coreai-core-{version('coreai-core')}-interpreter",
        operators=tuple(sorted(operators)),
    )
    return Built(spec, (*checks, *lowered))


def check_traced(
    programs: Mapping[Method, ExportedProgram], contracts: Mapping[Method, ProgramContract]
) -> list[CheckResult]:
    """What only the traced programs can show: the asset's program does not record the ranges of dynamic axes, and large
    constants are out of reach.

    Raises:
        GraphContractError: a check failed.
    """
    results = []
    for method, contract in contracts.items():
        # Where writes go is shown on the asset: through stacks, every node is on the way from a state to itself.
        flow = flow_of(programs[method], contract.input_names, positions=False)
        results.append(dynamic_ranges(programs[method], flow, Trace(flow), contract))
        results.append(finite_constants(programs[method], flow, contract))
    refuse_failed(results)
    return results


def beside(manifest: Manifest) -> dict[str, str]:
    """Apple's `metadata.json`, which finds `tokenizer/` beside itself."""
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
            "function_map": {"main": ["main"], "prompt": ["prefill"]},
            "states": {state.name: STATE_KINDS[state.kind] for state in manifest.states},
        },
    }
    return {METADATA_FILE: json.dumps(metadata, indent=2) + "\n"}
