"""onnxruntime-genai's own exporter, given Gemma 3's two RoPE bases under the names that it reads.

Transformers 5 keeps them per kind of layer in `rope_parameters`; the exporter of onnxruntime-genai 0.18 expects one
flat dictionary there and stops.
"""

from __future__ import annotations

import runpy
from typing import Any

from transformers import AutoConfig

load = AutoConfig.from_pretrained


def load_with_old_names(*arguments: Any, **named: Any) -> Any:
    config = load(*arguments, **named)
    ropes = getattr(config, "rope_parameters", None) or {}
    if "sliding_attention" in ropes:
        config.rope_theta = ropes["full_attention"]["rope_theta"]
        config.rope_local_base_freq = ropes["sliding_attention"]["rope_theta"]
        config.rope_parameters = {**ropes, "rope_type": "default"}
    return config


if __name__ == "__main__":
    AutoConfig.from_pretrained = load_with_old_names  # type: ignore[method-assign]
    runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__", alter_sys=True)
