"""A Core AI program as plain data, read from a saved asset.

An asset is a directory with one MLIR bytecode file, ``main.mlirb``. Its functions are straight-line and in SSA form:
a state is an argument of handle type, ``read_handle`` yields its content, ``write_handle`` replaces it. Values are
numbered; an operation refers to them by number.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from exporter.backends.coreai.library import library
from exporter.backends.coreai.ranges import Ranges, recorded_ranges
from exporter.errors import BundleError

BYTECODE, HASH = "main.mlirb", "main.hash"
"""The files of an asset that hold its program and the SHA-256 of that."""
INLINE_ELEMENTS = 4096
"""Constants up to this size are read into memory; larger ones are weights, of which only the place is read."""
_NUMPY = {"i1": "?", **{f"si{bits}": f"i{bits // 8}" for bits in (8, 16, 32, 64)}}
_NUMPY |= {f"ui{bits}": f"u{bits // 8}" for bits in (8, 16, 32, 64)} | {"f16": "f2", "f32": "f4"}
"""Element types that numpy has too: a Python buffer of any other type crashes the process (coreai-core 1.0.0b3)."""
_TENSOR = re.compile(r"tensor<((?:(?:\d+|\?)x)*)(\w+)>")
_RESOURCE = re.compile(r"dense_resource<([^>]+)>")


@dataclass(frozen=True)
class TensorType:
    """A tensor's dimensions, None where dynamic, and its element type as the dialect spells it, e.g. ``f32``."""

    shape: tuple[int | None, ...]
    element: str

    @property
    def is_integer(self) -> bool:
        return self.element.startswith(("si", "ui", "i"))

    @property
    def elements(self) -> int:
        """Number of elements; only for a static shape."""
        return 0 if None in self.shape else math.prod(n for n in self.shape if n is not None)

    @property
    def bits(self) -> int:
        return int(re.sub(r"\D.*", "", self.element.lstrip("suif")) or 0)

    @property
    def bytes(self) -> int:
        return math.ceil(self.elements * self.bits / 8)


@dataclass(frozen=True)
class Operation:
    """One operation.

    `constant` is the value of a small ``coreai.constant``, `resource` the name under which the file stores a large one.
    """

    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    constant: np.ndarray | None = None
    resource: str | None = None


@dataclass(frozen=True)
class Argument:
    """An input, a state or an output."""

    name: str
    value: int
    type: TensorType


@dataclass(frozen=True)
class Function:
    """One entry point. `types` holds the type of every value that is a tensor; tokens and handles have none."""

    name: str
    inputs: tuple[Argument, ...]
    states: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    operations: tuple[Operation, ...]
    types: dict[int, TensorType] = field(repr=False)

    @cached_property
    def producers(self) -> dict[int, Operation]:
        """The operation each value comes from; arguments have none."""
        return {value: operation for operation in self.operations for value in operation.results}

    @cached_property
    def uses(self) -> dict[int, list[tuple[Operation, int]]]:
        """The users of each value, and the operand as which they take it."""
        uses: dict[int, list[tuple[Operation, int]]] = {}
        for operation in self.operations:
            for place, value in enumerate(operation.operands):
                uses.setdefault(value, []).append((operation, place))
        return uses

    def constants(self) -> Iterator[tuple[Operation, TensorType]]:
        for operation in self.operations:
            if operation.name == "coreai.constant":
                yield operation, self.types[operation.results[0]]


class Asset:
    """The asset at `path`; its functions and the ranges recorded for them are read once.

    Raises:
        MissingPackageError: coreai-core is not installed.
        BundleError: no asset is there, or it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.functions = _read_functions(path)
        self.ranges: Ranges = recorded_ranges(path)

    @property
    def file_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.path.iterdir())


def _read_functions(path: Path) -> dict[str, Function]:
    """The functions of the asset at `path`, by name."""
    authoring = library("coreai.authoring")
    _check_hash(path)
    try:
        module = authoring.AIModelAsset.load(path).program._module._mlir_module
    except RuntimeError as error:
        raise refusal(path, f"what coreai-core cannot read ({error})") from error
    graphs = [op for op in module.operation.regions[0].blocks[0].operations if op.name == "coreai.graph"]
    functions = (_function(graph) for graph in graphs)
    return {function.name: function for function in functions}


def _check_hash(path: Path) -> None:
    """Compare the bytecode with the hash beside it: coreai-core 1.0.0b3 crashes on bytes it cannot parse."""
    try:
        expected = (path / HASH).read_bytes()
        with (path / BYTECODE).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise refusal(path, str(error)) from error
    if found != expected:
        raise refusal(path, f"a {BYTECODE} that is not the one {HASH} was made for")


def refusal(path: Path, got: str) -> BundleError:
    return BundleError(
        f"program {path.name}",
        got=got,
        expected=f"a Core AI asset, a directory that holds {BYTECODE} and {HASH}",
        repair="Export the model again.",
    )


def _function(graph: Any) -> Function:
    block = graph.regions[0].blocks[0]
    numbers: dict[Any, int] = {}
    types: dict[int, TensorType] = {}

    def number(value: Any) -> int:
        if value not in numbers:
            numbers[value] = len(numbers)
            if (found := _tensor_type(str(value.type))) is not None:
                types[numbers[value]] = found
        return numbers[value]

    inputs: list[Argument] = []
    states: list[Argument] = []
    for argument, attributes in zip(block.arguments, graph.attributes["arg_attrs"], strict=True):
        kind = str(argument.type)
        own = _tensor_type(kind) or _tensor_type(kind.removeprefix("!coreai.handle<").removesuffix(">"))
        assert own is not None, kind
        entry = Argument(attributes["coreai.name"].value, number(argument), own)
        (states if "handle" in kind else inputs).append(entry)

    operations, outputs = [], []
    for op in block.operations:
        operands = tuple(number(value) for value in op.operands)
        results = tuple(number(value) for value in op.results)
        constant, resource = _constant(op) if op.name == "coreai.constant" else (None, None)
        operations.append(Operation(op.name, operands, results, constant, resource))
        if op.name == "coreai.output":
            named = zip(graph.attributes["res_attrs"], operands, strict=True)
            outputs = [Argument(a["coreai.name"].value, v, types[v]) for a, v in named if v in types]
    name = graph.attributes["sym_name"].value
    return Function(name, tuple(inputs), tuple(states), tuple(outputs), tuple(operations), types)


def _tensor_type(text: str) -> TensorType | None:
    match = _TENSOR.fullmatch(text)
    if match is None:
        return None
    sizes = match[1].split("x")[:-1]
    return TensorType(tuple(None if n == "?" else int(n) for n in sizes), match[2])


def _constant(op: Any) -> tuple[np.ndarray | None, str | None]:
    """The value, if it is small, and the name under which the file stores it, if it is not part of the text."""
    attribute, kind = op.attributes["value"], _tensor_type(str(op.results[0].type))
    stored = _RESOURCE.match(str(attribute)[:200])
    resource = None if stored is None else stored[1]
    if kind is None or kind.element not in _NUMPY or kind.elements > INLINE_ELEMENTS:
        return None, resource
    return constant_value(op).reshape([n for n in kind.shape if n is not None]), resource


def constant_value(op: Any) -> np.ndarray:
    """The numbers of a ``coreai.constant``, flat; its element type must be one that numpy has."""
    values = np.array(op.attributes["value"])
    if values.dtype != np.object_:
        return values.reshape(-1)
    kind = _tensor_type(str(op.results[0].type))  # kept outside the text
    assert kind is not None and kind.element in _NUMPY, op.results[0].type
    values = np.empty(kind.elements, dtype=_NUMPY[kind.element])
    compiler = library("coreai._compiler._mlir_libs._coreaiIR._bindings").compiler
    compiler.copy_constant_value_to_array(constant_op=op, destination=values.view(np.uint8))
    return values


def read_file(path: Path) -> Asset:
    """See `FileModule.read_file`."""
    return Asset(path)
