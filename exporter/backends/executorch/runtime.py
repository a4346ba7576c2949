"""An ExecuTorch program (`.pte`) behind the `Program` interface."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from exporter.backends.executorch.options import AttentionKernels
from exporter.backends.executorch.ring_kernels import executorch_root, use_ring_kernels
from exporter.errors import BundleError
from exporter.quiet import native_stderr_hidden
from exporter.spec import PROGRAMS, ProgramSpec
from exporter.tricks.packed_weights import packed_weights


def prepare(threads: int | None = None) -> int:
    """See `RuntimeModule.prepare`; `threads` is the size of ExecuTorch's own pool from here on.

    Torch must keep to one thread: a second one, started by choosing a token from the logits, goes on spinning beside
    the pool's threads and costs an eighth of Gemma 3 270M's decode.
    """
    with native_stderr_hidden():
        # Importing registers the kernels that the file calls by name.
        import executorch.extension.llm.custom_ops.custom_ops
        import executorch.kernels.quantized
        import executorch.runtime  # noqa: F401
        from executorch.extension.pybindings import portable_lib

        portable_lib._threadpool_get_thread_count()  # the first use of the pool looks the processor up
        if threads is not None:
            portable_lib._unsafe_reset_threadpool(threads)
        use_ring_kernels(False)  # compiles them, if this machine has not done so yet
    return 1


def load(path: Path, program: ProgramSpec) -> PteProgram:
    """See `RuntimeModule.load`."""
    return PteProgram(path, program.options["kernels"], tuple(program.methods))


@contextlib.contextmanager
def one_torch_thread() -> Iterator[None]:
    """Keep torch to one thread: attention calls torch's BLAS from each thread of ExecuTorch's pool, and threads that
    BLAS starts spin beside the pool (a third of Gemma 3 270M's prefill and decode, on two cores)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_loaded: weakref.WeakSet[PteProgram] = weakref.WeakSet()
"""The programs alive; the first of them shares packed weights among its methods, and none beside it may."""


class PteProgram:
    """The methods of one `.pte` file, loaded once.

    Args:
        path: the file.
        kernels: its attention kernels: `ring`, those of `native/`, where they can be compiled, or `stock`,
            ExecuTorch's own.
        methods: the names of its methods.

    Raises:
        BundleError: the installed runtime refuses the file or one of its methods.
    """

    def __init__(
        self, path: Path, kernels: AttentionKernels = "ring", methods: Sequence[str] = tuple(PROGRAMS)
    ) -> None:
        prepare()
        from executorch.runtime import Runtime, Verification

        try:
            # The registry is the process's, and a method looks its kernels up while it loads.
            use_ring_kernels(kernels == "ring")
            with contextlib.nullcontext() if _loaded else packed_weights(executorch_root() / "lib"):
                # The bundle's checksum covers the whole file, so the runtime need not verify it again.
                self._program = Runtime.get().load_program(path, verification=Verification.Minimal)
                self._methods = {name: self._program.load_method(name) for name in methods}
        except (RuntimeError, KeyError) as error:
            raise BundleError(
                f"program {path.name}",
                got=f"a file the installed ExecuTorch refuses ({error})",
                expected=f"a program of the ExecuTorch version that the manifest names, with {' and '.join(methods)}",
                repair="Install that version, or export the model again.",
            ) from error
        _loaded.add(self)

    def run(self, method: str, input_ids: Tensor, position_ids: Tensor, states: Sequence[Tensor]) -> Tensor:
        """See `Program.run`."""
        # A tensor that is not contiguous would be copied on the way in, and the writes would be lost.
        assert all(state.is_contiguous() for state in states)
        loaded = self._methods[method]
        assert loaded is not None
        with one_torch_thread():
            (logits,) = loaded.execute([input_ids, position_ids, *states])
        return logits  # a copy, which the runtime's binding makes
