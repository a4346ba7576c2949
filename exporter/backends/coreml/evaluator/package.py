"""Open a saved ``.mlpackage``: its manifest, its model, its weights, and what its functions declare.

A package is a folder: ``Manifest.json`` names the items under ``Data/``, of which the root is the model (a protobuf)
and another the folder of weights, which the program calls ``@model_path/weights``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exporter.backends.coreml.evaluator.blob import BlobFile
from exporter.backends.coreml.evaluator.dtypes import BY_NUMBER, ElementType
from exporter.backends.coreml.evaluator.protobuf import messages
from exporter.errors import BundleError, RuntimeLimitError

MODEL_PATH = "@model_path/"
OPSET = "CoreML8"
"""iOS 18, the first with states. Operators changed between opsets; the kernels here are those of this one."""


@dataclass(frozen=True)
class TensorType:
    """A declared type. None in `shape`: a dimension known only at run time; a `shape` of None: an unknown rank."""

    element: ElementType
    shape: tuple[int | None, ...] | None

    def __str__(self) -> str:
        dims = "?" if self.shape is None else ", ".join("?" if n is None else str(n) for n in self.shape)
        return f"{self.element.name} [{dims}]"


@dataclass(frozen=True)
class Feature:
    """An input as the model describes it: an inclusive range for each axis, or the shapes it may take."""

    name: str
    ranges: tuple[tuple[int, int | None], ...]
    shapes: tuple[tuple[int, ...], ...] = ()

    def check(self, owner: str, shape: tuple[int, ...]) -> None:
        """Raise `RuntimeLimitError` when `shape` is not one that the package declares."""
        if self.shapes:
            fits = shape in self.shapes
            expected = " or ".join(str(list(s)) for s in self.shapes)
        else:
            fits = len(shape) == len(self.ranges) and all(
                low <= n and (high is None or n <= high) for n, (low, high) in zip(shape, self.ranges, strict=True)
            )
            parts = (str(low) if low == high else f"{low}..{high or ''}" for low, high in self.ranges)
            expected = f"[{', '.join(parts)}]"
        if not fits:
            raise RuntimeLimitError(
                owner,
                got=f"{self.name} {list(shape)}",
                expected=f"{self.name} {expected}, as the package declares",
                repair="Keep to the declared sizes, or export with larger limits.",
            )


@dataclass
class Package:
    """A parsed package; `weights` finds the file that a constant refers to."""

    path: Path
    model: Any
    root: Path
    _files: dict[str, BlobFile] = field(default_factory=dict)

    @property
    def functions(self) -> dict[str, Any]:
        return dict(self.model.mlProgram.functions)

    def weights(self, name: str) -> BlobFile:
        """The weight file called `name` (``@model_path/...``)."""
        if name not in self._files:
            path = self.root / name.removeprefix(MODEL_PATH)
            if not name.startswith(MODEL_PATH) or not path.resolve().is_relative_to(self.root.resolve()):
                raise self.error(got=f"weights at {name!r}", expected=f"a path below {MODEL_PATH}")
            self._files[name] = BlobFile(path)
        return self._files[name]

    def features(self, function: str) -> dict[str, Feature]:
        """The inputs of `function`, states left out, by name."""
        description = self.model.description
        described = {f.name: f.input for f in description.functions} or {function: description.input}
        if function not in described:
            raise self.error(got=f"no description of function {function}", expected="one for each function")
        return {feature.name: _feature(feature) for feature in described[function]}

    def error(self, *, got: str, expected: str, repair: str = "Export the package again.") -> BundleError:
        return BundleError(f"mlpackage {self.path.name}", got=got, expected=expected, repair=repair)


def open_package(path: Path) -> Package:
    """Read the package at `path`; no weight is read yet.

    Raises:
        BundleError: there is no such folder, it is no package, a file is missing or damaged, or the model is not a
            program of the opset that is evaluated here.
    """
    package = Package(path, None, path)
    if not path.is_dir():
        raise package.error(got="no such folder", expected="a folder whose name ends in .mlpackage")
    try:
        manifest = json.loads((path / "Manifest.json").read_text(encoding="utf-8"))
        items = manifest["itemInfoEntries"]
        model_file = path / "Data" / items[manifest["rootModelIdentifier"]]["path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise package.error(
            got=f"a Manifest.json that cannot be read ({type(error).__name__}: {error})",
            expected="Manifest.json with itemInfoEntries and rootModelIdentifier",
        ) from error
    if not model_file.is_file() or not model_file.resolve().is_relative_to(path.resolve()):
        raise package.error(got=f"no {model_file.name} inside", expected="the model that Manifest.json names")
    package.model = messages().Model()  # type: ignore[attr-defined]
    try:
        package.model.ParseFromString(model_file.read_bytes())
    except Exception as error:  # protobuf's own, whose class depends on its implementation
        raise package.error(
            got=f"a model that cannot be parsed ({error})", expected="a protobuf of CoreML.Specification.Model"
        ) from error
    kind = package.model.WhichOneof("Type")
    if kind != "mlProgram" or not package.functions:
        raise package.error(got=f"a model of kind {kind}", expected="an mlProgram with at least one function")
    package.root = model_file.parent
    for name, function in package.functions.items():
        if function.opset != OPSET or function.opset not in function.block_specializations:
            raise package.error(
                got=f"function {name} of opset {function.opset}",
                expected=f"opset {OPSET}, that of iOS 18",
                repair="Export with iOS 18 as the deployment target.",
            )
    return package


def tensor_type(value_type: Any) -> TensorType | None:
    """The tensor type of a ValueType, of a state's content too; None for lists, tuples and the like."""
    if value_type.WhichOneof("type") == "stateType":
        value_type = value_type.stateType.wrappedType
    if value_type.WhichOneof("type") != "tensorType":
        return None
    tensor = value_type.tensorType
    element = BY_NUMBER.get(tensor.dataType)
    if element is None:
        return None
    if tensor.rank < 0 or len(tensor.dimensions) != tensor.rank:
        return TensorType(element, None)
    return TensorType(
        element, tuple(int(d.constant.size) if d.WhichOneof("dimension") == "constant" else None
                       for d in tensor.dimensions)
    )  # fmt: skip


def _feature(description: Any) -> Feature:
    array = description.type.multiArrayType
    match array.WhichOneof("ShapeFlexibility"):
        case "shapeRange":
            sizes = array.shapeRange.sizeRanges
            # An upper bound below zero stands for none.
            ranges = tuple((int(r.lowerBound), int(r.upperBound) if r.upperBound >= 0 else None) for r in sizes)
            return Feature(description.name, ranges)
        case "enumeratedShapes":
            shapes = tuple(tuple(int(n) for n in s.shape) for s in array.enumeratedShapes.shapes)
            return Feature(description.name, (), shapes)
    return Feature(description.name, tuple((int(n), int(n)) for n in array.shape))
