"""What a Core AI asset says of itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from exporter.backends.coreai.file import Argument, Asset, Function
from exporter.backends.coreai.traits import TRAITS
from exporter.describe import FileDescription, FunctionDescription, Row

DTYPES = {
    "f32": "float32", "f16": "float16", "bf16": "bfloat16", "si32": "int32", "ui32": "uint32", "si8": "int8",
    "ui8": "uint8", "si4": "int4", "ui4": "uint4", "i1": "bool",
}  # fmt: skip


def describe(file: Asset) -> FileDescription:
    """The functions of an asset, and its weights by precision."""
    return FileDescription(
        file=file.path.name,
        format=TRAITS.name,
        functions=tuple(_function(function, file.ranges.get(name, {})) for name, function in file.functions.items()),
        weight_bytes=weight_bytes(file.functions),
        file_bytes=file.file_bytes,
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
    """A dynamic axis without a range in the asset accepts any length."""
    sizes = []
    for axis, n in enumerate(argument.type.shape):
        if n is not None:
            sizes.append(str(n))
        else:
            sizes.append("any" if ranges is None else "..".join(str(end) for end in ranges[axis]))
    return argument.name, DTYPES.get(argument.type.element, argument.type.element), f"[{', '.join(sizes)}]"


def weight_bytes(functions: Mapping[str, Function]) -> dict[str, int]:
    """Bytes of the large constants by dtype; a constant of both functions counts once."""
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
