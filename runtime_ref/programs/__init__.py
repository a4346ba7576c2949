"""The programs of a bundle behind one interface, whatever format they were lowered to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from exporter.bundle import Bundle
from exporter.errors import BundleError, RuntimeLimitError
from exporter.optional import optional
from exporter.spec import Format


class Program(Protocol):
    """Runs the methods of one model on state that the caller owns."""

    def run(self, method: str, input_ids: Tensor, position_ids: Tensor, states: Sequence[Tensor]) -> Tensor:
        """Run one method.

        Args:
            method: ``prefill`` (2 <= Q <= the bundle's chunk) or ``main`` (Q == 1).
            input_ids: [1, Q] int64.
            position_ids: [1, S] int64; only its length counts: S tokens after this call, S - Q before it.
            states: in the order of the manifest, written in place.

        Returns:
            Logits of the last token, [1, vocab] float32, in memory that no later call writes.
        """
        ...


def check_call(method: str, input_ids: Tensor, position_ids: Tensor) -> None:
    """The calling convention, kept for every format.

    Raises:
        RuntimeLimitError: a chunk for `main`, which writes its rings before it reads them and would lose keys of the
            chunk's first queries, or a single token for `prefill`.
    """
    query_len, seq_len = input_ids.shape[1], position_ids.shape[1]
    assert method in ("prefill", "main"), f"unknown method {method}"
    assert seq_len >= query_len, f"{seq_len} tokens after a call with {query_len}"
    if (query_len == 1) != (method == "main"):
        one = method == "main"
        raise RuntimeLimitError(
            f"program {method}",
            got=f"{query_len} token{'' if query_len == 1 else 's'}",
            expected="exactly 1" if one else "2 or more",
            repair="Run chunks through `prefill`, which reads before it writes."
            if one
            else "Run single tokens through `main`.",
        )


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


def prepare_runtime(format: Format, threads: int | None = None) -> None:
    """Import all that a program of `format` needs, and let it compute with `threads` threads, by default as many as it
    chooses (Core AI's interpreter always does): what is resident then is the bare process.

    ExecuTorch computes in a pool of its own. Torch then keeps to one thread: a second one, woken by the choice of a
    token from the logits, goes on spinning beside the pool's and takes an eighth of Gemma 3 270M's decode.

    Raises:
        MissingPackageError: the packages of the format are not installed.
    """
    if format == "executorch":
        from runtime_ref.programs import pte

        pte.prepare(threads)
        threads = 1
    elif format == "coreml":
        import runtime_ref.programs.mlpackage.program
    else:
        import runtime_ref.programs.aimodel  # noqa: F401

        optional("coreai.authoring", "coreai")
        optional("coreai.runtime", "coreai")
    if threads is not None:
        torch.set_num_threads(threads)


def load_program(bundle: Bundle) -> Program:
    """Load the one program of `bundle`.

    Raises:
        BundleError: it lacks a method, or the runtime refuses the file.
        MissingPackageError: the packages of its format are not installed.
    """
    program = bundle.manifest.program
    if not {"prefill", "main"} <= program.methods.keys():
        raise BundleError(
            f"bundle {bundle.path.name}",
            got=f"{program.file} with the methods {', '.join(program.methods) or 'none'}",
            expected="a program with the methods prefill and main",
            repair="Export the model again.",
        )
    # A runtime is imported when a program needs it: each takes seconds, and some are optional.
    if program.format == "executorch":
        from runtime_ref.programs.pte import PteProgram

        return PteProgram(bundle.path / program.file, program.kernels)
    if program.format == "coreml":
        from runtime_ref.programs.mlpackage.program import MLPackageProgram

        return MLPackageProgram(bundle.path / program.file, program)
    from runtime_ref.programs.aimodel import AimodelProgram

    return AimodelProgram(bundle.path / program.file, program)
