"""OpenVINO GenAI on the CPU: `LLMPipeline` for speed, the same files through OpenVINO's own runtime for likelihood."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from protocol import measure

CHUNK = 64  # of the scored prefix: the graph returns logits of every token


class OpenVINO:
    def __init__(self, model: Path, request: dict[str, Any]) -> None:
        self.files = (model / "openvino_model.bin", model / "openvino_model.xml")
        self._properties = {"INFERENCE_NUM_THREADS": request["threads"]}
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False  # otherwise a repeated prompt costs nothing
        scheduler.max_num_batched_tokens = 2**31
        self._pipeline = openvino_genai.LLMPipeline(model, "CPU", scheduler_config=scheduler, **self._properties)

    def run(self, ids: Sequence[int], count: int) -> list[float]:
        result = self._pipeline.generate(
            openvino.Tensor(np.array([ids], dtype=np.int64)), max_new_tokens=count, ignore_eos=True, do_sample=False
        )
        metrics = result.perf_metrics.raw_metrics
        first = metrics.m_times_to_first_token[0] / 1e6  # microseconds both
        later = [duration / 1e6 for duration in metrics.m_durations]
        assert len(result.tokens[0]) == count and len(later) == count - 1, (len(result.tokens[0]), len(later))
        return [first, *later]

    def rows(self, ids: Sequence[int], prefix: int) -> Iterator[np.ndarray]:
        request = openvino.Core().compile_model(self.files[1], "CPU", self._properties).create_infer_request()
        position = 0
        while position < len(ids) - 1:
            count = min(CHUNK, prefix - position) if position < prefix else 1
            inputs = {
                "input_ids": np.array([ids[position : position + count]], dtype=np.int64),
                "attention_mask": np.ones((1, position + count), dtype=np.int64),
                "position_ids": np.arange(position, position + count, dtype=np.int64)[None],
                "beam_idx": np.zeros(1, dtype=np.int32),
            }
            request.infer(inputs)
            position += count
            if position >= prefix:
                yield request.get_tensor("logits").data[0, -1]


if __name__ == "__main__":
    measure(OpenVINO, ("openvino", "openvino-genai"), sys.argv[1:])
