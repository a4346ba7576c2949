"""From a decoder to a checked `.pte`."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch.export import ExportedProgram

from exporter.backends.base import Built, Step, program_spec
from exporter.backends.executorch.checks import check_lowered, runtime_registry
from exporter.backends.executorch.file import read_pte
from exporter.backends.executorch.kernels import ExecutorchKernels, StockKernels, use_mixed_linear
from exporter.backends.executorch.lower import lower
from exporter.backends.executorch.options import ExecutorchOptions
from exporter.backends.executorch.traits import TRAITS
from exporter.cache.interface import CacheKernels
from exporter.errors import UnsupportedModelError
from exporter.graph import ProgramContract, check_exported, refuse_failed
from exporter.model.decoder import Decoder
from exporter.programs import Limits, method_spec, trace
from exporter.quantization.modules import QuantizedLinear
from exporter.spec import PROGRAMS, CheckResult, Manifest, Recipe
from exporter.units import in_unit


def kernels(options: ExecutorchOptions) -> CacheKernels:
    return ExecutorchKernels() if options.kernels == "ring" else StockKernels()


def beside(manifest: Manifest) -> dict[str, str]:
    return {}


def build(
    decoder: Decoder, limits: Limits, options: ExecutorchOptions, recipe: Recipe, *, directory: Path, step: Step
) -> Built:
    """See `BuildModule.build`."""
    check_codes(decoder)
    if options.kernels == "ring":
        use_mixed_linear(decoder)
    with step(f"trace {' and '.join(PROGRAMS)}"):
        programs = {name: trace(decoder, kind, limits) for name, kind in PROGRAMS.items()}
    contracts = graph_contracts(decoder, limits)
    with step("check graphs") as detail:
        checks = check_programs(programs, contracts)
        detail(f"{len(checks)} checks passed")
    with step("lower to ExecuTorch") as detail:
        path = directory / TRAITS.file
        lower(programs, path)
        del programs
        detail(in_unit(path.stat().st_size, "MB", 0))
    with step("check lowered program") as detail:
        runtime, operators = runtime_registry()
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            lowered = check_lowered(data, contracts, operators)
            refuse_failed(lowered)
            file = read_pte(data)
        outside = {name for plan in file.plans.values() for name in plan.operators_called()}
        detail(f"{sum(check.passed for check in lowered)} checks passed")
    methods = {name: method_spec(decoder, kind, limits) for name, kind in PROGRAMS.items()}
    program = program_spec(TRAITS, options, recipe, decoder.states, methods, runtime=runtime, operators=outside)
    return Built(program, (*checks, *lowered))


def check_codes(decoder: Decoder) -> None:
    """XNNPACK's weight cache knows a matrix by its integers; two with equal ones and different scales would get the
    same scales.

    Raises:
        UnsupportedModelError: `decoder` has such a pair.
    """
    seen: dict[bytes, tuple[str, torch.Tensor]] = {}
    for name, module in decoder.named_modules():
        if not isinstance(module, QuantizedLinear) or not module.weight.any():
            continue
        # Not by numpy: what it has looked at cannot be freed by name any more (`Decoder.let_go`).
        weight = module.weight.contiguous()
        content = (ctypes.c_char * weight.nbytes).from_address(weight.data_ptr())
        digest = hashlib.blake2b(content).digest()
        other, scales = seen.setdefault(digest, (name, module.scales))
        if not torch.equal(scales, module.scales):
            raise UnsupportedModelError(
                "quantization",
                got=f"{other} and {name} with the same integers and different scales",
                expected="matrices that differ in their integers, or in nothing",
                repair="Quantise one of them in another way, for example with keep_int8.",
            )


def graph_contracts(decoder: Decoder, limits: Limits) -> tuple[ProgramContract, ...]:
    """What every method promises."""
    return tuple(
        ProgramContract(method=name, interface=method_spec(decoder, kind, limits), states=decoder.states)
        for name, kind in PROGRAMS.items()
    )


def check_programs(programs: Mapping[str, ExportedProgram], contracts: Sequence[ProgramContract]) -> list[CheckResult]:
    """Hold every traced program to its contract.

    Raises:
        GraphContractError: a check failed.
    """
    results = [result for contract in contracts for result in check_exported(programs[contract.method], contract)]
    refuse_failed(results)
    return results
