"""The checks that look at the types and constants of a package's values.

Letters: Q query_len, V vocab_size.
"""

from __future__ import annotations

import numpy as np

from exporter.backends.coreml.file import Function, Package
from exporter.graph.contract import ProgramContract
from exporter.spec import CheckResult

_INTEGER_ONLY = frozenset({"shape", "range_1d", "mod", "floor_div"})
_ANGLES = frozenset({"cos", "sin"})
_SIXTEEN = frozenset({"int16", "uint16"})


def exact_index_arithmetic(function: Function, contract: ProgramContract) -> CheckResult:
    """Positions, slots and masks are computed in int32 and bool, angles in float32: float16 is not exact for integers
    above 2048, and 16-bit integers end at 32767.

    A position may be converted to float32; what is computed from it is float32 until a cosine or sine is taken.
    """
    problems, casts = [], 0
    positions: set[str] = set()
    for operation in function.operations:
        bound = [name for names in operation.inputs.values() for name in names]
        kinds = [function.types[name].dtype for name in bound if name in function.types]
        for name, made in operation.outputs.items():
            where = f"{operation.type} {operation.name}"
            if made.dtype in _SIXTEEN:
                problems.append(f"{where} gives {made.dtype}")
            if operation.type in _INTEGER_ONLY and made.dtype != "int32":
                problems.append(f"{where} gives {made.dtype}")
            if operation.type == "cast" and "int32" in kinds and made.dtype in {"float16", "float32"}:
                casts += 1
                positions.add(name)
            if positions & set(bound) and operation.type not in _ANGLES:
                positions.add(name)
            if name in positions and made.dtype == "float16":
                problems.append(f"{where} rounds a position to float16")
    return contract.result(
        "exact_index_arithmetic", problems, f"{casts} casts of integers, all to float32 for angles; no 16-bit integer"
    )


def last_token_logits_only(function: Function, contract: ProgramContract) -> CheckResult:
    """The one output is float32 ``[1, V]``, and nothing on the way has V and a dynamic axis."""
    vocab = contract.vocab_size
    outputs = [function.types[name] for name in function.outputs]
    problems = []
    if contract.last_token_only:
        if function.outputs != ("logits",) or [(o.dtype, o.shape) for o in outputs] != [("float32", (1, vocab))]:
            problems.append(f"the outputs are {outputs}, expected logits, float32 [1, {vocab}]")
        for operation in function.operations:
            problems += [
                f"{operation.type} {operation.name} is {made.shape}"
                for made in operation.outputs.values()
                if vocab in made.shape and None in made.shape
            ]
    return contract.result("last_token_logits_only", problems, f"output {outputs}, vocabulary {vocab}")


def finite_constants(package: Package, function: Function, contract: ProgramContract) -> CheckResult:
    """No infinity or NaN among the constants: half precision and NPU kernels misread them in masks."""
    problems, count = [], 0
    for name, value in function.constants.items():
        if function.types[name].dtype not in {"float16", "float32"}:
            continue
        count += 1
        if not np.isfinite(np.asarray(package.array(value))).all():
            problems.append(f"{name} holds a value that is not finite")
    return contract.result("finite_constants", problems, f"{count} constants, all finite")
