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
from exporter.backends.coreai.ranges import record_ranges
from exporter.cache.interface import CacheKernels
from exporter.cache.plain import PlainKernels
from exporter.graph import ProgramContract, refuse_failed
from exporter.graph.checks_export import dynamic_ranges, finite_constants
from exporter.graph.fx_flow import flow_of
from exporter.graph.provenance import Trace
from exporter.model.decoder import Decoder
from exporter.programs import METHODS, Limits, Method, method_spec, trace
from exporter.spec import IDS_DTYPES, CheckResult, CoreAIOptions, ProgramSpec

PROGRAM_FILE = "model.aimodel"
METADATA_FILE = "metadata.json"
VERSIONS = ("coreai-core", "coreai-torch", "coreai-opt")
IDS_DTYPE = IDS_DTYPES["coreai"]
STATE_KINDS = {"full": "kv_cache", "ring": "sliding_cache", "conv": "fixed"}
"""What Apple's metadata calls a state. A ``fixed`` one turns off going back to a shorter conversation."""


def kernels() -> CacheKernels:
    return PlainKernels()


def build(decoder: Decoder, limits: Limits, options: CoreAIOptions, directory: Path, step: Step) -> Built:
    """See `Backend.build`. Writes `PROGRAM_FILE` and, for Apple's runtime, `METADATA_FILE` beside it.

    Raises:
        MissingPackageError: Core AI's packages are not installed.
        UnsupportedModelError: the converter lacks an operator of the model.
        GraphContractError: a check failed.
    """
    contracts = {
        method: ProgramContract(method, method_spec(decoder, method, limits, IDS_DTYPE), decoder.states)
        for method in METHODS
    }
    with step("trace for Core AI"):
        programs = {method: trace(decoder, method, limits, IDS_DTYPE) for method in METHODS}
        checks = check_traced(programs, contracts)
    with step("convert to Core AI") as detail, contextlib.redirect_stdout(io.StringIO()):
        program = convert(programs, {method: own.interface for method, own in contracts.items()}, options.weights)
        record_ranges(program.save_asset(directory / PROGRAM_FILE), contracts.values())
        del program, programs
        size = sum(file.stat().st_size for file in (directory / PROGRAM_FILE).iterdir())
        detail(f"{size / 1e6:.0f} MB")
    with step("check Core AI program") as detail:
        lowered = check_file(directory / PROGRAM_FILE, list(contracts.values()))
        refuse_failed(lowered)
        detail(f"{len(lowered)} checks passed")
    operators = {name for function in describe(directory / PROGRAM_FILE).functions for name in function.operators}
    spec = ProgramSpec(
        format="coreai",
        file=PROGRAM_FILE,
        weights=options.weights,
        states=decoder.states,
        methods={method: own.interface for method, own in contracts.items()},
        runtime=f"coreai-core-{version('coreai-core')}-interpreter",
        operators=tuple(sorted(operators)),
    )
    write_metadata(directory, decoder, limits)
    return Built(spec, (*checks, *lowered))


def check_traced(
    programs: Mapping[Method, ExportedProgram], contracts: Mapping[Method, ProgramContract]
) -> list[CheckResult]:
    """What only the traced programs can show: the asset does not record the ranges of its dynamic axes, and its large
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


def write_metadata(directory: Path, decoder: Decoder, limits: Limits) -> None:
    """Apple's `metadata.json`, which finds `tokenizer/` beside itself."""
    metadata = {
        "metadata_version": "0.2",
        "kind": "llm",
        "name": decoder.spec.family,
        "assets": {"main": PROGRAM_FILE},
        "language": {
            "tokenizer": "tokenizer",
            "embedded_tokenizer": True,
            "vocab_size": decoder.spec.vocab_size,
            "max_context_length": limits.max_context_length,
            "function_map": {"main": ["main"], "prompt": ["prefill"]},
            "states": {state.name: STATE_KINDS[state.kind] for state in decoder.states},
        },
    }
    (directory / METADATA_FILE).write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
