"""What a Core AI asset says of itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from exporter.backends.coreai.program import Argument, Function, read_program
from exporter.backends.coreai.ranges import recorded_ranges
from exporter.describe import FileDescription, FunctionDescription, Row

DTYPES = {
    "f32": "float32", "f16": "float16", "bf16": "bfloat16", "si32": "int32", "ui32": "uint32", "si8": "int8",
    "ui8": "uint8", "si4": "int4", "ui4": "uint4", "i1": "bool",
}  # fmt: skip


def describe(path: Path) -> FileDescription:
    """The functions of the asset at `path`, and its weights by precision.

    Raises:
        MissingPackageError: coreai-core is not installed.
        BundleError: the asset cannot be read.
    """
    functions = read_program(path)
    ranges = recorded_ranges(path)
    return FileDescription(
        format="coreai",
        functions=tuple(_function(function, ranges.get(name, {})) for name, function in functions.items()),
        weight_bytes=weight_bytes(functions),
        file_bytes=sum(file.stat().st_size for file in path.iterdir()),
    )


def _function(function: Function, ranges: Mapping[str, Sequence[Sequence[int]]]) -> FunctionDescription:
    names = Counter(op.name.removeprefix("coreai.").removeprefix("decomposable.") for op in function.operations)
    return FunctionDescription(
        name=function.name,
        inputs=tuple(_row(argument, ranges.get(argument.name)) for argument in function.inputs),
        states=tuple(_row(argument, ranges.get(argument.name)) for argument in function.states),
        outputs=tuple(_row(argument, ranges.get(argument.name)) for argument in function.outputs),
        operators=dict(sorted(names.items())),
    )


def _row(argument: Argument, ranges: Sequence[Sequence[int]] | None) -> Row:
    """A dynamic axis is any length where the asset has no range for it."""
    sizes = []
    for axis, n in enumerate(argument.type.shape):
        if n is not None:
            sizes.append(str(n))
        else:
            sizes.append("any" if ranges is None else "..".join(str(end) for end in ranges[axis]))
    return argument.name, DTYPES.get(argument.type.element, argument.type.element), f"[{', '.join(sizes)}]"


def weight_bytes(functions: Mapping[str, Function]) -> dict[str, int]:
    """Bytes of the large constants by dtype, each counted once though both functions use it."""
    stored = {
        operation.resource: kind
        for function in functions.values()
        for operation, kind in function.constants()
        if operation.resource is not None
    }
    total: Counter[str] = Counter()
    for kind in stored.values():
        total[DTYPES.get(kind.element, kind.element)] += kind.bytes
    return dict(sorted(total.items()))
