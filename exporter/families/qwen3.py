"""Qwen 3: Llama with normed queries and keys. Meaning of the config: ``transformers.models.qwen3``."""

from __future__ import annotations

from exporter.families import qwen2
from exporter.families.llama_like import llama_like
from exporter.families.reading import from_max_window_layers

DEFAULTS = qwen2.DEFAULTS | {"head_dim": 128, "attention_bias": False}

FAMILY = llama_like("qwen3", defaults=DEFAULTS, layer_types=from_max_window_layers, qk_norm=True)
