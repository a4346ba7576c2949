"""From a decoder to a checked package."""

from __future__ import annotations

from pathlib import Path

from exporter.backends import Built, Step
from exporter.backends.coreml.cache import CoremlKernels
from exporter.cache.interface import CacheKernels
from exporter.graph.contract import ProgramContract, refuse_failed
from exporter.model.decoder import Decoder
from exporter.programs import METHODS, Limits, Method, method_spec
from exporter.quantization.matrices import Storage, grids_of
from exporter.spec import IDS_DTYPES, CoreMLOptions, Manifest, MethodSpec, ProgramSpec

PROGRAM_FILE = "model.mlpackage"
VERSIONS = ("coremltools",)
RUNTIME = "iOS 18, macOS 15"
"""The first systems with states and functions."""


def kernels(options: CoreMLOptions) -> CacheKernels:
    return CoremlKernels()


def beside(manifest: Manifest) -> dict[str, str]:
    return {}


def build(decoder: Decoder, limits: Limits, options: CoreMLOptions, directory: Path, step: Step) -> Built:
    """See `Backend.build`; `decoder` is left as it is."""
    from exporter.backends.coreml import convert, cures
    from exporter.backends.coreml.checks import check_package
    from exporter.backends.coreml.compress import compress
    from exporter.backends.coreml.description import describe_package
    from exporter.backends.coreml.package import Package
    from exporter.backends.coreml.precision import FLOAT32, SHIPPED, in_precision
    from exporter.backends.coreml.stateful import trace_stateful

    path = directory / PROGRAM_FILE
    interfaces: dict[str, MethodSpec] = {method: interface_of(decoder, method, limits) for method in METHODS}
    grids = grids_of(decoder, Storage("coreml", options.weights, options.keep_int8))
    rounded = in_precision(decoder, FLOAT32 if options.weights == "float32" else SHIPPED)
    functions = {}
    for method in METHODS:
        with step(f"trace {method}"):
            traced = cures.rewrite(trace_stateful(rounded, method, interfaces[method]))
        with step(f"convert {method} to Core ML"):
            functions[method] = convert.to_mil(traced)
        del traced
    program = convert.merge(functions)
    if grids:
        with step(f"weights to {options.weights}") as detail:
            detail(f"{compress(program, rounded, grids)} matrices")
    with step("write package") as detail:
        convert.share_memory(program)
        convert.save(program, path)
        del program, functions, rounded
    with step("check package") as detail:
        contracts = [ProgramContract(method, interfaces[method], decoder.states) for method in METHODS]
        package = Package(path)
        checks = check_package(package, contracts)
        refuse_failed(checks)
        description = describe_package(package)
        detail(f"{len(checks)} checks passed, {description.file_bytes / 1e6:.0f} MB")
    operators = sorted({name for function in description.functions for name in function.operators})
    spec = ProgramSpec(
        format="coreml",
        file=PROGRAM_FILE,
        weights=options.weights,
        keep_int8=options.keep_int8,
        max_kl_divergence=options.max_kl_divergence,
        states=decoder.states,
        methods=interfaces,
        runtime=RUNTIME,
        operators=tuple(operators),
    )
    return Built(spec, tuple(checks))


def interface_of(decoder: Decoder, method: Method, limits: Limits) -> MethodSpec:
    """The interface of a method; Core ML has no int64 input."""
    return method_spec(decoder, method, limits, IDS_DTYPES["coreml"])
