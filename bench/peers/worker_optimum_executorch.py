"""What optimum-executorch exports, on ExecuTorch's own runtime, the program called as its runner does.

Its runner passes a whole prompt. Gemma's program takes at most 511 tokens, so longer prompts go in pieces: its rings
keep two windows, which is enough, and its predictions after that are as near to float32 as before.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import executorch.extension.llm.custom_ops.custom_ops
import executorch.kernels.quantized  # noqa: F401
import torch
from executorch.extension.pybindings import portable_lib
from protocol import measure


class OptimumExecuTorch:
    def __init__(self, model: Path, request: dict[str, Any]) -> None:
        portable_lib._threadpool_get_thread_count()
        portable_lib._unsafe_reset_threadpool(request["threads"])
        torch.set_num_threads(1)  # attention calls its BLAS from every thread of ExecuTorch's pool
        self.files = (model / "model.pte",)
        self._module = portable_lib._load_for_executorch(str(self.files[0]))
        self._longest = self._module.method_meta("forward").input_tensor_meta(0).sizes()[1]

    def _logits(self, ids: Sequence[int], position: int) -> Any:
        """Of the last of `ids`, which stand from `position` on; [vocab] float32."""
        for start in range(0, len(ids), self._longest):
            piece = torch.tensor([ids[start : start + self._longest]])
            first = position + start
            places = torch.arange(first, first + piece.shape[1])
            # Logits of every position: of 511 tokens of Gemma's half a GB, which need no copy.
            (logits,) = self._module.forward((piece, places), clone_outputs=False)
        return logits[0, -1]

    def run(self, ids: Sequence[int], count: int) -> list[float]:
        tokens, position, seconds = list(ids), 0, []
        for _ in range(count):
            start = time.perf_counter()
            logits = self._logits(tokens, position)
            position += len(tokens)
            tokens = [int(logits.numpy().argmax())]
            seconds.append(time.perf_counter() - start)
        return seconds

    def rows(self, ids: Sequence[int], prefix: int) -> Iterator[Any]:
        yield self._logits(ids[:prefix], 0).numpy()
        for position in range(prefix, len(ids) - 1):
            yield self._logits([ids[position]], position).numpy()


if __name__ == "__main__":
    measure(OptimumExecuTorch, ("optimum-executorch", "executorch", "torch"), sys.argv[1:])
