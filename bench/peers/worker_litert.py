"""LiteRT on the CPU: the ``.tflite`` of `litert-torch export_hf`, through the runtime's `CompiledModel`.

As LiteRT-LM calls it: all of a prompt except its last token goes through the prefill signatures, padded to their
lengths; the last goes through `decode`, the only one that returns logits.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert.compiled_model import CompiledModel
from ai_edge_litert.cpu_options import CpuOptions
from ai_edge_litert.options import Options
from protocol import measure

MASKED = -1e9


class LiteRT:
    def __init__(self, model: Path, request: dict[str, Any]) -> None:
        file = model / "model_quantized.tflite"
        self.files = (file,)
        # Packed weights of all signatures in one file, as LiteRT-LM keeps them: the first load writes it.
        packed = str(model / "packed_weights")
        options = Options(cpu_options=CpuOptions(num_threads=request["threads"], xnnpack_weight_cache_path=packed))
        self._model = CompiledModel.from_file(str(file), options=options)
        names = self._model.get_signature_list()["decode"]["inputs"]
        # Input and output at once: a call writes its rows of the caches where they are.
        self._caches = {
            name: self._model.create_input_buffer_by_name("decode", name)
            for name in names
            if name.startswith("kv_cache")
        }
        self._rows = self._model.get_input_tensor_details("decode")["mask"]["shape"][-1]
        self._lengths = sorted(
            int(name.removeprefix("prefill_")) for name in self._model.get_signature_list() if name != "decode"
        )
        signatures = {"decode": 1} | {f"prefill_{length}": length for length in self._lengths}
        self._inputs = {
            signature: {
                name: self._model.create_input_buffer_by_name(signature, name)
                for name in ("tokens", "input_pos", "mask")
            }
            for signature in signatures
        }
        self._logits = self._model.create_output_buffer_by_name("decode", "logits")
        self._vocabulary = self._model.get_output_tensor_details("decode")["logits"]["shape"][-1]

    def _call(self, signature: str, length: int, ids: Sequence[int], position: int) -> None:
        """Run `ids`, which stand from `position` on, padded to `length`; later tokens overwrite the padding's rows."""
        inputs = self._inputs[signature]
        positions = np.arange(position, position + length, dtype=np.int32)
        tokens = np.zeros(length, dtype=np.int32)
        tokens[: len(ids)] = ids
        inputs["tokens"].write(tokens)
        inputs["input_pos"].write(positions)
        inputs["mask"].write(np.where(np.arange(self._rows) <= positions[:, None], 0, MASKED).astype(np.float32))
        outputs = self._caches | ({"logits": self._logits} if signature == "decode" else {})
        self._model.run_by_name(signature, inputs | self._caches, outputs)

    def _decode(self, token: int, position: int) -> np.ndarray:
        """[vocab] float32."""
        self._call("decode", 1, [token], position)
        return self._logits.read(self._vocabulary, np.float32)

    def _prefill(self, ids: Sequence[int]) -> None:
        start = 0
        while start < len(ids):
            left = len(ids) - start
            length = next((length for length in self._lengths if length >= left), self._lengths[-1])
            self._call(f"prefill_{length}", length, ids[start : start + length], start)
            start += length

    def run(self, ids: Sequence[int], count: int) -> list[float]:
        seconds = []
        start = time.perf_counter()
        self._prefill(ids[:-1])
        token = ids[-1]
        for index in range(count):
            token = int(self._decode(token, len(ids) - 1 + index).argmax())
            seconds.append(time.perf_counter() - start)
            start = time.perf_counter()
        return seconds

    def rows(self, ids: Sequence[int], prefix: int) -> Iterator[np.ndarray]:
        self._prefill(ids[: prefix - 1])
        for position in range(prefix - 1, len(ids) - 1):
            yield self._decode(ids[position], position)


if __name__ == "__main__":
    measure(LiteRT, ("litert-torch", "ai-edge-litert", "torch"), sys.argv[1:])
