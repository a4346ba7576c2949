"""llama.cpp through llama-cpp-python, from the same GGUF, with window-sized sliding caches and flash attention."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from protocol import DECODED, measure


class LlamaCpp:
    def __init__(self, model: Path, request: dict[str, Any]) -> None:
        self.files = (model,)
        # The cache is allocated whole, so a context no longer than what is asked for.
        context = max(*request["lengths"], sum(request["score"] or (0,))) + DECODED + 1
        self._llama = llama_cpp.Llama(
            model_path=str(model),
            n_ctx=context,
            n_threads=request["threads"],
            n_threads_batch=request["threads"],
            swa_full=False,
            flash_attn=True,
            verbose=False,
        )

    def _logits(self) -> np.ndarray:
        """[vocab] float32 of the last token, llama.cpp's own memory."""
        pointer = llama_cpp.llama_get_logits_ith(self._llama.ctx, -1)
        return np.ctypeslib.as_array(pointer, shape=(self._llama.n_vocab(),))

    def run(self, ids: Sequence[int], count: int) -> list[float]:
        self._llama.reset()
        tokens, seconds = list(ids), []
        for _ in range(count):
            start = time.perf_counter()
            self._llama.eval(tokens)
            tokens = [int(self._logits().argmax())]
            seconds.append(time.perf_counter() - start)
        return seconds

    def rows(self, ids: Sequence[int], prefix: int) -> Iterator[np.ndarray]:
        self._llama.reset()
        self._llama.eval(ids[:prefix])
        yield self._logits()
        for token in ids[prefix:-1]:
            self._llama.eval([token])
            yield self._logits()


if __name__ == "__main__":
    measure(LlamaCpp, ("llama-cpp-python",), sys.argv[1:])
