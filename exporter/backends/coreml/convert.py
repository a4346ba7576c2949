"""Traced methods to one multifunction package whose functions share every weight.

Both functions are converted to MIL over the same memory, put into one program and written once: saving two packages,
loading them again and comparing their weights would take several times as long and hold every weight several times.
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
from coremltools.converters.mil.mil import Program
from torch.export import ExportedProgram

from exporter.backends.coreml import cures
from exporter.programs import Method

TARGET = ct.target.iOS18
"""States and multifunction packages begin here."""


@contextmanager
def quiet() -> Iterator[None]:
    """Without the converter's progress bars and its warnings about versions and int64."""
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
        return ct.convert(
            program,
            convert_to="milinternal",
            minimum_deployment_target=TARGET,
            # Every type is in the traced program already; float32 here means that no pass chooses any.
            compute_precision=ct.precision.FLOAT32,
            outputs=[ct.TensorType(name="logits")],
            pass_pipeline=cures.pass_pipeline(),
        )


def merge(functions: Mapping[Method, Program]) -> Program:
    """One program with a function for each method; constants over the same memory share their bytes in the file."""
    merged = Program()
    for name, program in functions.items():
        merged.add_function(name, program.functions["main"])
    merged.default_function_name = "main"
    merged.export_as_multifunction = True
    return merged


def share_memory(program: Program) -> int:
    """Give constants over the same memory one id, by which the writer stores them once; returns how many are shared."""
    places: dict[tuple[Any, ...], list[Any]] = {}
    for function in program.functions.values():
        for op in function.operations:
            if op.op_type == "const" and isinstance(op.outputs[0].val, np.ndarray) and op.outputs[0].val.size >= 10:
                value = op.outputs[0].val
                key = (value.__array_interface__["data"][0], value.shape, value.dtype.str)
                places.setdefault(key, []).append(op)
    shared = [ops for ops in places.values() if len(ops) > 1]
    for index, ops in enumerate(shared):
        for op in ops:
            op.weight_id = f"shared_{index}"
    return len(shared)


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
