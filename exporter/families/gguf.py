"""Reading the description of a model in the metadata of a GGUF file, whatever its architecture.

Meaning of the keys: ggml's ``docs/gguf.md`` and llama.cpp's ``src/llama-model.cpp``. Where layers may differ, a key
holds one value for all or an array of one value a layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from exporter.families.base import Shapes
from exporter.families.reading import LayerType, contradiction, pattern_layer_types, unsupported, within
from exporter.spec import RopeSpec

COMMON_KEYS = frozenset({
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned",
})  # fmt: skip


def short_decimal(value: float) -> float:
    """The shortest decimal that rounds to the float32 `value`: 9.99999997e-07 was written as 1e-06."""
    return float(str(np.float32(value)))


class GGUFMetadata:
    """The keys of one architecture, and what the table of tensors adds to them.

    Args:
        metadata: the file's, key -> value.
        shapes: its tensors, name -> shape in torch's order.
        known: the keys the family reads, without the architecture; any other may change the arithmetic, so it is
            refused.

    Raises:
        UnsupportedModelError: a key outside `known`.
    """

    def __init__(self, metadata: Mapping[str, Any], shapes: Shapes, known: frozenset[str]) -> None:
        self.architecture = str(metadata["general.architecture"])
        self.shapes = shapes
        tokens = metadata.get("tokenizer.ggml.tokens")
        self._tokens = len(tokens) if isinstance(tokens, list) else 0  # the tokenizer's own reader judges the rest
        prefix = self.architecture + "."
        self._values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
        if unknown := sorted(set(self._values) - known):
            raise unsupported(
                f"GGUF metadata {', '.join(prefix + key for key in unknown)}", f"among {', '.join(sorted(known))}"
            )
        self.num_layers = self.integer("block_count")

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key that has one for the whole model; equal values a layer are that one.

        Raises:
            UnsupportedModelError: the values differ from layer to layer.
        """
        value = self._values.get(key, default)
        if isinstance(value, list):
            if not value or any(one != value[0] for one in value):
                raise unsupported(f"{self.architecture}.{key} that differs from layer to layer", "one number")
            value = value[0]
        return short_decimal(value) if isinstance(value, float) else value

    def _whole(self, key: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise contradiction(f"{self.architecture}.{key} = {value!r}", "a positive number")
        return within(f"{self.architecture}.{key}", value)

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive whole number of the whole model."""
        return self._whole(key, self.get(key, default))

    def number(self, key: str, default: float | None = None) -> float:
        """A number of the whole model."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise contradiction(f"{self.architecture}.{key} = {value!r}", "a number")
        return float(value)

    def by_layer(self, key: str, default: Any = None) -> list[Any]:
        """The value of each layer, from one for all or one a layer."""
        value = self._values.get(key, default)
        if not isinstance(value, list):
            return [value] * self.num_layers
        if len(value) != self.num_layers:
            raise contradiction(
                f"{self.architecture}.{key} with {len(value)} values", f"one for each of {self.num_layers} layers"
            )
        return value

    def integers(self, key: str, default: int | Sequence[int] | None = None) -> list[int]:
        """A positive whole number of each layer."""
        return [self._whole(key, value) for value in self.by_layer(key, default)]

    def attention(self, head_dim: int | None = None) -> list[dict[str, Any]]:
        """Heads of each layer and their size, and the usual scale: fields of `AttentionSpec`.

        Args:
            head_dim: what it is when the file is silent; None means the hidden size shared out among the heads of the
                first layer, as in llama.cpp.
        """
        heads = self.integers("attention.head_count")
        kv_heads = self.integers("attention.head_count_kv", heads)
        size = self.integer("attention.key_length", head_dim or self.integer("embedding_length") // heads[0])
        return [
            {"num_attention_heads": n, "num_key_value_heads": kv, "head_dim": size, "scale": size**-0.5}
            for n, kv in zip(heads, kv_heads, strict=True)
        ]

    def layer_types(self, default: int) -> list[LayerType]:
        """Which layers slide: every `attention.sliding_window_pattern`-th does not, or those whose value is true do."""
        key = "attention.sliding_window_pattern"
        slides = self.by_layer(key, default)
        if not isinstance(self._values.get(key), list):
            return pattern_layer_types(slides[0], self.num_layers)
        return ["sliding_attention" if value else "full_attention" for value in slides]

    def rope(self, head_dim: int) -> RopeSpec:
        """RoPE of the layers that scale it. A factor without a type is a linear one, as in llama.cpp."""
        plain = RopeSpec(
            theta=self.number("rope.freq_base", 10000.0), rotary_dim=self.integer("rope.dimension_count", head_dim)
        )
        kind = self.get("rope.scaling.type", "none" if self.get("rope.scaling.factor") is None else "linear")
        if kind == "none":
            return plain
        if kind != "linear":
            raise unsupported(f"{self.architecture}.rope.scaling.type = {kind!r}", "none or linear")
        return plain.model_copy(update={"scaling": "linear", "factor": self.number("rope.scaling.factor")})

    def model_fields(self) -> dict[str, Any]:
        """What every architecture spells alike: fields of `ModelSpec`."""
        # Rows of the embedding; a converter pads the list of tokens to them.
        vocab_size = self.shapes["token_embd.weight"][0] if "token_embd.weight" in self.shapes else self._tokens
        return {
            "vocab_size": vocab_size,
            "hidden_size": self.integer("embedding_length"),
            "norm_eps": self.number("attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": "output.weight" not in self.shapes,
            "max_position_embeddings": self.integer("context_length"),
        }


def llama3_rope(plain: RopeSpec, factors: torch.Tensor) -> RopeSpec:
    """Recover Llama 3.1's scaling from ``rope_freqs``, the divisors a GGUF file stores in place of its parameters.

    The published models share original context 8192 and frequency factors 1 and 4; only the factor differs, and it is
    the largest divisor. The formula (``_compute_llama3_parameters``) must then give back every divisor.
    """
    factor, low, high, original = float(factors.max()), 1.0, 4.0, 8192
    for i, stored in enumerate(factors.tolist()):
        wavelength = 2 * math.pi * plain.theta ** (2 * i / plain.rotary_dim)
        smooth = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
        if not math.isclose(stored, 1 / ((1 - smooth) / factor + smooth), rel_tol=1e-3):
            raise unsupported(f"rope_freqs.weight with divisor {stored} at {i}", "the divisors of Llama 3.1 scaling")
    return plain.model_copy(
        update={
            "scaling": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }
    )
