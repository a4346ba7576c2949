"""Qwen 2: Llama with biases before attention. Meaning of the config: ``transformers.models.qwen2``."""

from __future__ import annotations

from exporter.families.llama_like import COMMON_DEFAULTS, llama_like
from exporter.families.reading import from_max_window_layers

DEFAULTS = COMMON_DEFAULTS | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

FAMILY = llama_like("qwen2", defaults=DEFAULTS, layer_types=from_max_window_layers, qkv_bias=True)
