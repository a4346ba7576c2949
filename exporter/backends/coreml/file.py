"""A saved package as its files have it: functions, operators, constants, weights.

Of coremltools only the protocol buffers are used, not the converter: what is checked is what an app will load.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from exporter.errors import BundleError

DATA, MODEL = Path("Data") / "com.apple.CoreML", "model.mlmodel"
_BLOB_HEADER = struct.Struct("<IIQQ")  # sentinel, dtype, bytes, offset of the data
_BLOB_SENTINEL = 0xDEADBEEF
DTYPES = {
    "BOOL": "bool", "STRING": "string", "FLOAT16": "float16", "FLOAT32": "float32", "FLOAT64": "float64",
    "INT4": "int4", "UINT4": "uint4", "INT8": "int8", "UINT8": "uint8", "INT16": "int16", "UINT16": "uint16",
    "INT32": "int32", "UINT32": "uint32", "INT64": "int64",
}  # fmt: skip
"""MIL's dtypes by the manifest's names."""
_BYTES = {"float16": np.float16, "int8": np.int8, "uint8": np.uint8, "int16": np.int16, "uint16": np.uint16,
          "uint32": np.uint32}  # fmt: skip


@dataclass(frozen=True)
class Typed:
    """A value's declared type; an unknown dimension is None."""

    dtype: str
    shape: tuple[int | None, ...]


@dataclass(frozen=True)
class Blob:
    """Constant data in the weights file: where, how many bytes, of which dtype."""

    offset: int
    size: int
    dtype: str


@dataclass(frozen=True)
class Operation:
    """One operator; `inputs` are names of values by parameter; constants written in place get names of their own."""

    type: str
    name: str
    inputs: dict[str, tuple[str, ...]]
    outputs: dict[str, Typed]

    def one(self, parameter: str) -> str | None:
        """The name bound to a parameter of one value, if there is any."""
        return self.inputs.get(parameter, (None,))[0]


@dataclass
class Function:
    """One straight-line function."""

    name: str
    inputs: dict[str, Typed]
    states: dict[str, Typed]
    outputs: tuple[str, ...]
    operations: list[Operation] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)
    """Protocol-buffer values by name."""
    types: dict[str, Typed] = field(default_factory=dict)


def read_spec(path: Path) -> Any:
    """The model specification of the package at `path`. coremltools' own reader would rewrite Manifest.json."""
    from coremltools.proto import Model_pb2

    spec = Model_pb2.Model()
    spec.ParseFromString((path / DATA / MODEL).read_bytes())
    return spec


class Package:
    """The package at `path`.

    Raises:
        BundleError: it is missing or damaged, or holds something other than a program of straight-line functions.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._check_manifest()
        try:
            self.spec: Any = read_spec(path)
        except Exception as error:  # of the protocol buffers, whose classes are not public
            raise self.error(str(error), "a readable model specification") from error
        if self.spec.WhichOneof("Type") != "mlProgram":
            raise self.error(f"a model of type {self.spec.WhichOneof('Type')}", "an ML program")

    def error(self, got: str, expected: str) -> BundleError:
        return BundleError(f"package {self.path.name}", got=got, expected=expected, repair="Export the model again.")

    def _check_manifest(self) -> None:
        """Whether Core ML, which follows the manifest, would find the model that is read here."""
        try:
            manifest = json.loads((self.path / "Manifest.json").read_text(encoding="utf-8"))
            model = manifest["itemInfoEntries"][manifest["rootModelIdentifier"]]["path"]
        except OSError as error:
            found = "no Manifest.json in it" if self.path.is_dir() else "no such directory"
            raise self.error(found, "a Core ML package") from error
        except (ValueError, KeyError, TypeError) as error:
            raise self.error("a Manifest.json that names no model", "a Core ML package") from error
        if self.path / "Data" / model != self.path / DATA / MODEL:
            raise self.error(f"a Manifest.json whose model is {model}", f"{DATA.name}/{MODEL}")

    @cached_property
    def weights(self) -> np.memmap:
        """The weights file, read as bytes when they are asked for."""
        file = self.path / DATA / "weights" / "weight.bin"
        if not file.is_file():
            raise self.error("no weights file", str(file.relative_to(self.path)))
        return np.memmap(file, dtype=np.uint8, mode="r")

    @property
    def file_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())

    def descriptions(self) -> dict[str, Any]:
        """The interface that an app sees, by function, from the specification."""
        return {record.name: record for record in self.spec.description.functions}

    def functions(self) -> dict[str, Function]:
        return {name: self._function(name, proto) for name, proto in self.spec.mlProgram.functions.items()}

    def _function(self, name: str, proto: Any) -> Function:
        blocks = list(proto.block_specializations.values())
        if len(blocks) != 1:
            raise self.error(f"{len(blocks)} specialisations of {name}", "one")
        (block,) = blocks
        inputs = {value.name: _typed(value.type) for value in proto.inputs}
        states = {value.name: inputs.pop(value.name) for value in proto.inputs
                  if value.type.WhichOneof("type") == "stateType"}  # fmt: skip
        function = Function(name, inputs, states, tuple(block.outputs), types={**inputs, **states})
        for proto_operation in block.operations:
            if proto_operation.blocks:
                raise self.error(f"{proto_operation.type} with blocks in {name}", "straight-line functions")
            self._add(function, proto_operation)
        return function

    def _add(self, function: Function, proto: Any) -> None:
        outputs = {value.name: _typed(value.type) for value in proto.outputs}
        function.types |= outputs
        if proto.type == "const":
            (name,) = outputs
            function.constants[name] = proto.attributes["val"]
            return
        own = proto.attributes["name"].immediateValue.tensor.strings.values[0]
        inputs: dict[str, tuple[str, ...]] = {}
        for parameter, argument in proto.inputs.items():
            names = []
            for place, binding in enumerate(argument.arguments):
                if binding.WhichOneof("binding") == "value":
                    names.append(f"{own}.{parameter}.{place}")
                    function.constants[names[-1]] = binding.value
                    function.types[names[-1]] = _typed(binding.value.type)
                else:
                    names.append(binding.name)
            inputs[parameter] = tuple(names)
        function.operations.append(Operation(proto.type, own, inputs, outputs))

    def blob(self, value: Any) -> Blob | None:
        """Where a constant's data is, if it is in the weights file."""
        if value.WhichOneof("value") != "blobFileValue":
            return None
        start = value.blobFileValue.offset
        header = bytes(self.weights[start : start + _BLOB_HEADER.size])
        if len(header) < _BLOB_HEADER.size or _BLOB_HEADER.unpack(header)[0] != _BLOB_SENTINEL:
            raise self.error(f"no data at byte {start} of the weights file", "a blob with its header")
        _, _, size, offset = _BLOB_HEADER.unpack(header)
        if offset + size > len(self.weights):
            raise self.error(f"{len(self.weights)} bytes of weights", f"at least {offset + size}")
        return Blob(offset, size, _typed(value.type).dtype)

    def array(self, value: Any) -> np.ndarray | str:
        """A constant's content; 4-bit data as bytes that hold two numbers each."""
        declared, blob = _typed(value.type), self.blob(value)
        shape = tuple(n or 0 for n in declared.shape)
        if blob is not None:
            raw = self.weights[blob.offset : blob.offset + blob.size]
            if declared.dtype in {"int4", "uint4"}:
                return raw
            return raw.view(np.dtype(declared.dtype)).reshape(shape)
        tensor = value.immediateValue.tensor
        kind = tensor.WhichOneof("value")
        if kind == "strings":
            return str(tensor.strings.values[0])
        if kind == "bytes":
            return np.frombuffer(tensor.bytes.values, _BYTES[declared.dtype]).reshape(shape)
        values = getattr(tensor, kind).values if kind else []
        return np.array(values, dtype=np.dtype(declared.dtype)).reshape(shape)

    def blobs(self) -> Iterator[Blob]:
        """The data of every constant of every function; functions that share data yield it once each."""
        for function in self.functions().values():
            for value in function.constants.values():
                blob = self.blob(value)
                if blob is not None:
                    yield blob


def _typed(proto: Any) -> Typed:
    kind = proto.WhichOneof("type")
    if kind == "stateType":
        return _typed(proto.stateType.wrappedType)
    if kind != "tensorType":
        return Typed(str(kind), ())
    tensor = proto.tensorType
    name = type(tensor).DESCRIPTOR.fields_by_name["dataType"].enum_type.values_by_number[tensor.dataType].name
    shape = tuple(n.constant.size if n.WhichOneof("dimension") == "constant" else None for n in tensor.dimensions)
    return Typed(DTYPES.get(name, name.lower()), shape)


def read_file(path: Path) -> Package:
    """See `FileModule.read_file`."""
    return Package(path)
