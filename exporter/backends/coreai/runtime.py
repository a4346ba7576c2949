"""A Core AI program (`.aimodel`) behind the `Program` interface, run by the CPU interpreter of coreai-core's wheel."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
import weakref
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exporter.errors import BundleError
from exporter.optional import optional
from exporter.quiet import native_stderr_hidden
from exporter.room import require_room
from exporter.spec import ProgramSpec

BYTECODE, MAGIC = "main.mlirb", b"ML\xefR"
UNPACKED_MARGIN = 16 * 2**20
"""Bytes that an unpacked program has beside its weights: 0.6 MB a layer were seen."""


def prepare(threads: int | None) -> int | None:
    """See `RuntimeModule.prepare`; the interpreter chooses its number of threads itself."""
    optional("coreai.authoring", "coreai")
    optional("coreai.runtime", "coreai")
    return threads


def load(path: Path, program: ProgramSpec) -> AimodelProgram:
    """See `RuntimeModule.load`."""
    return AimodelProgram(path, program)


class AimodelProgram:
    """Both functions of one `.aimodel`, loaded once.

    The interpreter has its own memory: a call copies the caller's states there and back. On Apple's systems a state is
    passed as it is and written in place.

    Raises:
        MissingPackageError: coreai-core is not installed.
        BundleError: the interpreter refuses the asset, or it is not the one that `spec` describes, or there is no room
            for the files it is unpacked to.
    """

    def __init__(self, path: Path, spec: ProgramSpec) -> None:
        authoring = optional("coreai.authoring", "coreai")
        self._array: Any = optional("coreai.runtime", "coreai").NDArray
        self._states = [state.name for state in spec.states]
        self._loop = _Loop()
        names = {method: own.function or method for method, own in spec.methods.items()}
        _require_room(path)
        try:
            # The interpreter crashes the process on damaged bytes; the bundle's checksum has excluded those.
            with (path / BYTECODE).open("rb") as file:
                if file.read(len(MAGIC)) != MAGIC:
                    raise _refusal(path, f"{BYTECODE} is no MLIR bytecode")
            with native_stderr_hidden():
                self._asset = authoring.AIModelAsset.load(path).executable()
                # The files unpacked for the interpreter are removed on exit.
                model = self._loop.run(self._asset.__aenter__())
                self._functions = {method: model.load_function(name) for method, name in names.items()}
            weakref.finalize(self, _close, self._loop, self._asset)
        except (OSError, RuntimeError) as error:
            raise _refusal(path, str(error)) from error
        for method, function in self._functions.items():
            if function is None:
                raise _refusal(path, f"no function {names[method]}")
            if sorted(function.desc.state_names) != sorted(self._states):
                raise _refusal(path, f"{names[method]} takes the states {', '.join(function.desc.state_names)}")

    def run(self, method: str, input_ids: Tensor, position_ids: Tensor, states: Sequence[Tensor]) -> Tensor:
        """See `Program.run`."""
        held = {name: self._array(state.numpy()) for name, state in zip(self._states, states, strict=True)}
        inputs = {
            name: self._array(ids.to(torch.int32).numpy())
            for name, ids in (("input_ids", input_ids), ("position_ids", position_ids))
        }
        outputs = self._loop.run(self._functions[method](inputs=inputs, state=held))
        for state, array in zip(states, held.values(), strict=True):
            state.copy_(torch.from_numpy(array.numpy()))
        logits: Tensor = torch.from_numpy(outputs["logits"].numpy()).float()
        return logits.clone()


def _require_room(path: Path) -> None:
    """The interpreter works on a copy of the asset in the directory for temporary files, with a map of its operators;
    where the disk is full it crashes the process."""
    try:
        size = sum(file.stat().st_size for file in path.iterdir())
        require_room(Path(tempfile.gettempdir()), size, margin=UNPACKED_MARGIN)
    except OSError as error:
        raise BundleError(
            f"program {path.name}",
            got=f"no room to unpack it ({error})",
            expected="its size and a little more, free in the directory for temporary files",
            repair="Free some space, or name another directory in the environment variable TMPDIR.",
        ) from error


def _refusal(path: Path, reason: str) -> BundleError:
    return BundleError(
        f"program {path.name}",
        got=f"an asset that does not load ({reason})",
        expected="a Core AI asset of this bundle, with its functions and states",
        repair="Install the coreai-core version that the manifest names, or export the model again.",
    )


class _Loop:
    """An event loop in its own thread: the interpreter's calls are coroutines, and the caller may have a loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


def _close(loop: _Loop, asset: Any) -> None:
    with contextlib.suppress(RuntimeError):
        loop.run(asset.__aexit__(None, None, None))
    loop.stop()
