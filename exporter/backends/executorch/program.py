"""From a decoder to a checked `.pte`."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch.export import ExportedProgram

from exporter.backends import Built, Step
from exporter.backends.executorch.cache import ExecutorchKernels, StockKernels
from exporter.backends.executorch.lower import lower
from exporter.cache.interface import CacheKernels
from exporter.errors import UnsupportedModelError
from exporter.graph import (
    ProgramContract,
    check_exported,
    check_lowered,
    read_pte,
    refuse_failed,
    runtime_registry,
)
from exporter.model.decoder import Decoder
from exporter.programs import METHODS, Limits, Method, method_spec, trace
from exporter.quantization.bits import weight_bits
from exporter.quantization.modules import QuantizedLinear
from exporter.spec import CheckResult, ExecutorchOptions, Manifest, ProgramSpec, QuantizationSpec

PROGRAM_FILE = "model.pte"
VERSIONS = ("executorch", "torchao")


def kernels(options: ExecutorchOptions) -> CacheKernels:
    return ExecutorchKernels() if options.kernels == "ring" else StockKernels()


def beside(manifest: Manifest) -> dict[str, str]:
    return {}


def build(decoder: Decoder, limits: Limits, options: ExecutorchOptions, directory: Path, step: Step) -> Built:
    """See `Backend.build`; `decoder` is built and quantised as `options` say."""
    check_codes(decoder)
    with step("trace prefill and main"):
        programs = {method: trace(decoder, method, limits) for method in METHODS}
    contracts = graph_contracts(decoder, limits)
    with step("check graphs") as detail:
        checks = check_programs(programs, contracts)
        detail(f"{len(checks)} checks passed")
    with step("lower to ExecuTorch") as detail:
        path = directory / PROGRAM_FILE
        lower(programs, path)
        del programs
        detail(f"{path.stat().st_size / 1e6:.0f} MB")
    with step("check lowered program") as detail:
        runtime, operators = runtime_registry()
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            lowered = check_lowered(data, contracts, operators)
            refuse_failed(lowered)
            file = read_pte(data)
        outside = sorted({name for plan in file.plans.values() for name in plan.operators_called()})
        detail(f"{sum(check.passed for check in lowered)} checks passed")
    program = ProgramSpec(
        format="executorch",
        file=PROGRAM_FILE,
        weights=_weights(decoder, options.quantization),
        states=decoder.states,
        methods={method: method_spec(decoder, method, limits) for method in METHODS},
        runtime=runtime,
        operators=tuple(outside),
        kernels=options.kernels,
    )
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


def _weights(decoder: Decoder, options: QuantizationSpec) -> str:
    """In words, with the average bits a weight."""
    if not options.is_quantized:
        return "float32"
    head = f"head {options.head}"
    if options.head_int8_rows:
        head += f" but {min(options.head_int8_rows, decoder.spec.vocab_size)} rows"
    kinds = [f"linear {options.linear}", f"embedding {options.embedding}", head]
    kinds += ["smoothed"] * options.smooth + ["gptq"] * (options.rounding == "gptq")
    bits = weight_bits(decoder)
    return f"{', '.join(kinds)}; {bits.read:.2f} bits a weight read for a token, {bits.stored:.2f} stored"


def graph_contracts(decoder: Decoder, limits: Limits) -> tuple[ProgramContract, ...]:
    """What every method promises."""
    return tuple(
        ProgramContract(method=method, interface=method_spec(decoder, method, limits), states=decoder.states)
        for method in METHODS
    )


def check_programs(
    programs: Mapping[Method, ExportedProgram], contracts: Sequence[ProgramContract]
) -> list[CheckResult]:
    """Hold every traced program to its contract.

    Raises:
        GraphContractError: a check failed.
    """
    results = [
        result
        for method, contract in zip(METHODS, contracts, strict=True)
        for result in check_exported(programs[method], contract)
    ]
    refuse_failed(results)
    return results
