"""From a decoder to a checked package."""

from __future__ import annotations

from pathlib import Path

from exporter.backends.base import Built, Step, program_spec
from exporter.backends.coreml.kernels import CoremlKernels
from exporter.backends.coreml.options import CoreMLOptions
from exporter.backends.coreml.traits import TRAITS
from exporter.cache.interface import CacheKernels
from exporter.graph.contract import ProgramContract, refuse_failed
from exporter.model.decoder import Decoder
from exporter.programs import Limits, method_spec
from exporter.room import native_writing, require_room
from exporter.spec import PROGRAMS, Manifest, MethodSpec, ProgramKind, Recipe
from exporter.units import in_unit

RUNTIME = "iOS 18, macOS 15"
"""The first systems with states and functions."""


def kernels(options: CoreMLOptions) -> CacheKernels:
    return CoremlKernels()


def beside(manifest: Manifest) -> dict[str, str]:
    return {}


def build(
    decoder: Decoder, limits: Limits, options: CoreMLOptions, recipe: Recipe, *, directory: Path, step: Step
) -> Built:
    """See `BuildModule.build`; `decoder` is left as it is."""
    from exporter.backends.coreml import convert, cures
    from exporter.backends.coreml.checks import check_package
    from exporter.backends.coreml.compress import compress
    from exporter.backends.coreml.description import describe
    from exporter.backends.coreml.file import Package
    from exporter.backends.coreml.precision import FLOAT32, SHIPPED, in_precision
    from exporter.backends.coreml.stateful import trace_stateful

    path = directory / TRAITS.file
    interfaces = {name: interface_of(decoder, kind, limits) for name, kind in PROGRAMS.items()}
    rounded = in_precision(decoder, FLOAT32 if recipe.is_float32 else SHIPPED)
    functions = {}
    for method, kind in PROGRAMS.items():
        with step(f"trace {method}"):
            traced = cures.rewrite(trace_stateful(rounded, kind, interfaces[method]))
        with step(f"convert {method} to Core ML"):
            functions[method] = convert.to_mil(traced)
        del traced
    program = convert.merge(functions)
    if recipe.rounded:
        with step(f"weights to {options.described(recipe)}") as detail:
            detail(f"{compress(program, rounded, recipe)} matrices")
    with step("write package") as detail:
        convert.share_memory(program)
        require_room(directory, recipe.stored_bytes, copies=2)  # coremltools writes beside, and copies
        with native_writing(directory):
            convert.save(program, path)
        del program, functions, rounded
    with step("check package") as detail:
        contracts = [ProgramContract(method, own, decoder.states) for method, own in interfaces.items()]
        package = Package(path)
        checks = check_package(package, contracts)
        refuse_failed(checks)
        description = describe(package)
        detail(f"{len(checks)} checks passed, {in_unit(description.file_bytes, 'MB', 0)}")
    operators = {name for function in description.functions for name in function.operators}
    spec = program_spec(TRAITS, options, recipe, decoder.states, interfaces, runtime=RUNTIME, operators=operators)
    return Built(spec, tuple(checks))


def interface_of(decoder: Decoder, kind: ProgramKind, limits: Limits) -> MethodSpec:
    """The interface of a program; Core ML has no int64 input."""
    return method_spec(decoder, kind, limits, TRAITS.ids_dtype)
