"""Mistral: Llama without biases whose layers all slide. Meaning of the config: ``transformers.models.mistral``.

Its GGUF files call themselves llama.
"""

from __future__ import annotations

from exporter.families.llama_like import COMMON_DEFAULTS, llama_like
from exporter.families.reading import all_slide

DEFAULTS = COMMON_DEFAULTS | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}

FAMILY = llama_like("mistral", defaults=DEFAULTS, layer_types=all_slide, gguf=False)
