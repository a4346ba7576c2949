"""The programs of a bundle behind one interface for all formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from exporter.backends import Program, runtime_module
from exporter.bundle import Bundle
from exporter.errors import BundleError
from exporter.spec import PROGRAMS

__all__ = ["EagerProgram", "Program", "choose", "load_program", "prepare_runtime"]


class EagerProgram:
    """Runs callables ``(input_ids, position_ids, *states) -> logits``, one for each program, that write the states in
    place."""

    def __init__(self, methods: Mapping[str, Callable[..., Tensor]]) -> None:
        self._methods = methods

    def run(self, method: str, input_ids: Tensor, position_ids: Tensor, states: Sequence[Tensor]) -> Tensor:
        """See `Program.run`."""
        with torch.no_grad():
            return self._methods[method](input_ids, position_ids, *states)


class CheckedProgram:
    """A program that is called by the convention of its kind alone.

    `run` raises RuntimeLimitError for a number of tokens that the kind does not take: a chunk for `main`, which writes
    its rings before it reads them, would lose keys of the chunk's first queries.
    """

    def __init__(self, program: Program) -> None:
        self._program = program

    def run(self, method: str, input_ids: Tensor, position_ids: Tensor, states: Sequence[Tensor]) -> Tensor:
        """See `Program.run`."""
        PROGRAMS[method].check_call(input_ids.shape[1], position_ids.shape[1])
        return self._program.run(method, input_ids, position_ids, states)


def choose(bundle: Bundle, format: str | None) -> Bundle:
    """`bundle` with the program of `format` alone, by default its first.

    Raises:
        BundleError: it has no such program.
    """
    formats = [program.format for program in bundle.manifest.programs]
    chosen = next((own for own in formats if format in (None, own)), None)
    if chosen is None:
        raise BundleError(
            f"bundle {bundle.path.name}",
            got=f"format {format}",
            expected=f"one of {', '.join(formats)}, the formats of its programs",
            repair="Choose one of those, or export the model again with that target.",
        )
    return Bundle(bundle.path, bundle.manifest.of(chosen))


def prepare_runtime(format: str, threads: int | None = None) -> None:
    """Import all that a program of `format` needs, and let it compute with `threads` threads, by default as many as it
    chooses. Memory resident afterwards is that of the bare process.

    Raises:
        MissingPackageError: the packages of the format are not installed.
    """
    own = runtime_module(format).prepare(threads)
    if own is not None:
        torch.set_num_threads(own)


def load_program(bundle: Bundle) -> Program:
    """Load the one program of `bundle`.

    Raises:
        BundleError: it lacks a method, or the runtime refuses the file.
        MissingPackageError: the packages of its format are not installed.
    """
    program = bundle.manifest.program
    if not PROGRAMS.keys() <= program.methods.keys():
        raise BundleError(
            f"bundle {bundle.path.name}",
            got=f"{program.file} with the methods {', '.join(program.methods) or 'none'}",
            expected=f"a program with the methods {' and '.join(PROGRAMS)}",
            repair="Export the model again.",
        )
    return CheckedProgram(runtime_module(program.format).load(bundle.path / program.file, program))
