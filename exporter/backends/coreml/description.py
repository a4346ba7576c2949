"""What a package says of itself, for ``exporter inspect``."""

from __future__ import annotations

from collections import Counter
from typing import Any

from exporter.backends.coreml.file import Function, Package
from exporter.backends.coreml.traits import TRAITS
from exporter.describe import FileDescription, FunctionDescription, Row

_ARRAY_DTYPES = {65568: "float32", 65600: "float64", 65552: "float16", 131104: "int32", 131080: "int8"}
"""Core ML's array types by their number."""
_COMPRESSED = "constexpr_"


def describe(file: Package) -> FileDescription:
    """See `DescriptionModule.describe`."""
    functions = file.functions()
    descriptions = file.descriptions()
    return FileDescription(
        file=file.path.name,
        format=TRAITS.name,
        functions=tuple(_function(functions[name], descriptions[name]) for name in sorted(functions)),
        weight_bytes=weight_bytes(file),
        file_bytes=file.file_bytes,
    )


def _function(function: Function, record: Any) -> FunctionDescription:
    return FunctionDescription(
        name=function.name,
        inputs=tuple(_row(one.name, one.type.multiArrayType) for one in record.input),
        states=tuple(_row(one.name, one.type.stateType.arrayType) for one in record.state),
        outputs=tuple(_row(one.name, one.type.multiArrayType) for one in record.output),
        operators=dict(sorted(Counter(operation.type for operation in function.operations).items())),
    )


def _row(name: str, array: Any) -> Row:
    ranges = [(one.lowerBound, one.upperBound) for one in array.shapeRange.sizeRanges]
    sizes = ranges or [(n, n) for n in array.shape]
    shape = ", ".join(str(low) if low == high else f"{low}..{high}" for low, high in sizes)
    return name, _ARRAY_DTYPES.get(array.dataType, str(array.dataType)), f"[{shape}]"


def weight_bytes(package: Package) -> dict[str, int]:
    """The bytes of the weights file by content, each place once.

    Tables of a palette count as ``lut``, scales of integers as ``scales``, everything else by its dtype.
    """
    places: dict[int, tuple[str, int]] = {}
    for function in package.functions().values():
        tables = {
            name: {"lut": "lut", "scale": "scales"}.get(parameter)
            for operation in function.operations
            if operation.type.startswith(_COMPRESSED)
            for parameter, names in operation.inputs.items()
            for name in names
        }
        for name, value in function.constants.items():
            blob = package.blob(value)
            if blob is not None:
                places[blob.offset] = (tables.get(name) or blob.dtype, blob.size)
    total: Counter[str] = Counter()
    for kind, size in places.values():
        total[kind] += size
    return dict(sorted(total.items(), key=lambda item: -item[1]))
