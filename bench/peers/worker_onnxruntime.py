"""onnxruntime-genai on the CPU, int4."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai
from protocol import measure

LEAST = 513  # a shorter cache than Gemma's window is refused


class ONNXRuntime:
    def __init__(self, model: Path, request: dict[str, Any]) -> None:
        self.files = (model / "model.onnx", model / "model.onnx.data")
        config = onnxruntime_genai.Config(str(model))
        options = {"intra_op_num_threads": request["threads"]}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._model = onnxruntime_genai.Model(config)

    def _generator(self, length: int) -> Any:
        parameters = onnxruntime_genai.GeneratorParams(self._model)
        length = max(length, LEAST)
        # With the least length equal to the greatest, end tokens do not stop it.
        parameters.set_search_options(max_length=length, min_length=length, do_sample=False)
        return onnxruntime_genai.Generator(self._model, parameters)

    def run(self, ids: Sequence[int], count: int) -> list[float]:
        seconds = []
        start = time.perf_counter()
        generator = self._generator(len(ids) + count)
        generator.append_tokens(np.array([ids], dtype=np.int32))
        for _ in range(count):
            generator.generate_next_token()  # the first chooses from the prompt's logits, later ones run a token first
            seconds.append(time.perf_counter() - start)
            start = time.perf_counter()
        return seconds

    def rows(self, ids: Sequence[int], prefix: int) -> Iterator[np.ndarray]:
        generator = self._generator(len(ids) + 1)
        pieces = [ids[:prefix], *([token] for token in ids[prefix:-1])]
        for piece in pieces:
            generator.append_tokens(np.array([piece], dtype=np.int32))
            yield generator.get_logits().reshape(-1, generator.get_logits().shape[-1])[-1]


if __name__ == "__main__":
    measure(ONNXRuntime, ("onnxruntime-genai", "onnxruntime"), sys.argv[1:])
