"""Traced methods to one multifunction package whose functions share every weight.

Both functions are converted to MIL over the same memory, put into one program and written once. Saving two packages and
merging them would take several times as long and hold every weight several times.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Program, types
from torch.export import ExportedProgram

from exporter.backends.coreml import cures
from exporter.backends.coreml.file import DATA, read_spec
from exporter.spec import MAIN

FUNCTION = "main"
"""The converter's name for the function of a program."""
TARGET = ct.target.iOS18
"""The first iOS with states and multifunction packages."""


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the converter's progress bars and its warnings about versions and int64."""
    logger = logging.getLogger("coremltools")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


def to_mil(program: ExportedProgram) -> Program:
    """One method, rewritten already, as a MIL program with a single function. No weight is copied."""
    with quiet(), cures.translations():
        converted = ct.convert(
            program,
            convert_to="milinternal",
            minimum_deployment_target=TARGET,
            # Every type is in the traced program already; float32 here keeps the passes from choosing types.
            compute_precision=ct.precision.FLOAT32,
            outputs=[ct.TensorType(name="logits")],
            pass_pipeline=cures.pass_pipeline(),
        )
    wrong = other_types(program, converted)
    assert not wrong, f"the converter changed types: {', '.join(wrong)}"
    return converted


def other_types(traced: ExportedProgram, converted: Program) -> list[str]:
    """The values that are float16 in one program and float32 in the other, by the names that both use."""
    dtypes = {"torch.float16": "fp16", "torch.float32": "fp32"}
    want = {node.name: dtypes.get(str(getattr(node.meta.get("val"), "dtype", None))) for node in traced.graph.nodes}
    return [
        f"{op.op_type} {var.name} is {types.builtin_to_string(var.dtype)}"
        for op in converted.functions[FUNCTION].operations
        for var in op.outputs
        if op.op_type not in {"const", "read_state"}
        and want.get(var.name) is not None
        and types.builtin_to_string(var.dtype) in dtypes.values()
        and want[var.name] != types.builtin_to_string(var.dtype)
    ]


def merge(functions: Mapping[str, Program]) -> Program:
    """One program with a function for each method; constants over the same memory share their bytes in the file."""
    merged = Program()
    for name, program in functions.items():
        merged.add_function(name, program.functions[FUNCTION])
    merged.default_function_name = MAIN.name
    merged.export_as_multifunction = True
    return merged


def memory_of(value: np.ndarray) -> tuple[Any, ...]:
    """A key that arrays over the same memory share."""
    return (value.__array_interface__["data"][0], value.shape, value.dtype.str)


SMALL = 2**20
"""Constants up to so many bytes are compared by content: the zeros that every linear adds, tables of angles."""


def share_memory(program: Program) -> None:
    """Give equal constants one id, so that the writer stores them once: large constants over the same memory, small
    ones with the same content."""
    places: dict[tuple[Any, ...], list[Any]] = {}
    for function in program.functions.values():
        for op in function.operations:
            value = op.outputs[0].val if op.op_type == "const" else None
            if isinstance(value, np.ndarray) and value.size > 1:
                same = value.tobytes() if value.nbytes <= SMALL else None
                place = memory_of(value) if same is None else (same, value.shape, str(op.outputs[0].dtype))
                places.setdefault(place, []).append(op)
    for index, ops in enumerate(ops for ops in places.values() if len(ops) > 1):
        for op in ops:
            op.weight_id = f"shared_{index}"


def save(program: Program, path: Path) -> None:
    """Write the package."""
    with quiet():
        pipeline = ct.PassPipeline.EMPTY
        model = ct.convert(
            program,
            convert_to="mlprogram",
            minimum_deployment_target=TARGET,
            compute_precision=ct.precision.FLOAT32,
            pass_pipeline=pipeline,
            skip_model_load=True,
        )
        model.save(str(path))
    for stray in path.glob("*_mapping.json"):  # of coremltools' own debugging; no part of the package
        stray.unlink()
    describe_as_ranges(path)


def describe_as_ranges(path: Path) -> None:
    """Describe a fixed input beside dynamic ones as a range of one length.

    Core ML takes a fixed input for a list of one shape, and in a model with states refuses lists beside ranges
    (apple/coremltools#2548: "A model doesn't allow a mixture of enumerated and range shape flexibility").
    """
    spec = read_spec(path)
    for function in spec.description.functions:
        arrays = [one.type.multiArrayType for one in function.input]
        if any(array.WhichOneof("ShapeFlexibility") == "shapeRange" for array in arrays):
            for array in arrays:
                if array.WhichOneof("ShapeFlexibility") is None:
                    for size in array.shape:
                        array.shapeRange.sizeRanges.add(lowerBound=size, upperBound=size)
    (path / DATA / "model.mlmodel").write_bytes(spec.SerializeToString())
