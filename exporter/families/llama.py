"""Llama, and the families that differ from it in data only: Mistral, Qwen2, Qwen3.

Meaning of the configs: ``transformers.models.{llama,mistral,qwen2,qwen3}``. A GGUF file of the ``llama`` architecture
stores query and key rows with the two halves of each head interleaved, because llama.cpp rotates adjacent pairs there;
they are put back into half-split order. Qwen's are stored as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from exporter.families.base import (
    ATTENTION_GGUF,
    ATTENTION_HF,
    IGNORED_HF,
    MLP_GGUF,
    MLP_HF,
    QK_NORM_GGUF,
    QK_NORM_HF,
    TOP_GGUF,
    TOP_HF,
    Family,
    NameMap,
    ReadTensor,
    Target,
)
from exporter.families.reading import (
    COMMON_GGUF_KEYS,
    GGUFMetadata,
    LayerType,
    activation,
    contradiction,
    explicit_layer_types,
    gguf_vocab_size,
    positive,
    positive_number,
    rope_parameters,
    rope_spec,
    unsupported,
    window_length,
)
from exporter.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, RopeSpec

THETA = 10_000.0


@dataclass(frozen=True)
class Variant:
    """What sets one model type apart.

    windows: ``none``; ``all`` layers slide; or those from `max_window_layers` on, when `use_sliding_window`.
    qkv_bias: None means the config's `attention_bias`, which then speaks of the output projection too.
    """

    defaults: Mapping[str, Any]
    windows: Literal["none", "all", "from_max_window_layers"]
    qkv_bias: bool | None = None
    qk_norm: bool = False
    mlp_bias: bool = False


_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "head_dim": None,
}
_MISTRAL = {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_QWEN2 = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

# Defaults are those of Transformers' config classes.
VARIANTS = {
    "llama": Variant(_DEFAULTS | {"attention_bias": False, "mlp_bias": False}, windows="none", mlp_bias=True),
    "mistral": Variant(_DEFAULTS | _MISTRAL, windows="all", qkv_bias=False),
    "qwen2": Variant(_DEFAULTS | _QWEN2, windows="from_max_window_layers", qkv_bias=True),
    "qwen3": Variant(
        _DEFAULTS | _QWEN2 | {"head_dim": 128, "attention_bias": False},
        windows="from_max_window_layers",
        qk_norm=True,
    ),
}

_HF = NameMap(
    layer=ATTENTION_HF
    | QK_NORM_HF
    | MLP_HF
    | {
        "input_layernorm.weight": "input_norm.weight",
        "post_attention_layernorm.weight": "feed_forward_norm.weight",
    },
    top=TOP_HF,
    ignored=IGNORED_HF,
)
_GGUF = NameMap(
    layer=ATTENTION_GGUF
    | QK_NORM_GGUF
    | MLP_GGUF
    | {"attn_norm.weight": "input_norm.weight", "ffn_norm.weight": "feed_forward_norm.weight"},
    top=TOP_GGUF,
    # Both hold RoPE frequencies; `_llama3_rope` has understood or refused the first.
    ignored=(r"rope_freqs\.weight", r"blk\.\d+\.attn_rot_embd\.weight"),
)


def unpermute(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Interleaved rotary pairs ``[r0 i0 r1 i1 ..]`` of each head -> half-split ``[r0 r1 .. i0 i1 ..]``.

    Args:
        tensor: ``[heads * head_dim, D]`` weights or ``[heads * head_dim]`` biases.
    """
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(tensor.shape)


def _layer_types(config: Mapping[str, Any], variant: Variant, num_layers: int) -> list[LayerType]:
    """What the config's window fields imply, or `layer_types` where the model type knows it."""
    window = window_length(config.get("sliding_window"))
    slides = window is not None and config.get("use_sliding_window", True)
    if variant.windows == "none" and slides:
        raise unsupported(
            f"sliding_window = {window} in a model type whose layers never slide", "null, or model_type mistral"
        )
    first = 0
    if variant.windows == "from_max_window_layers":
        first = config["max_window_layers"]
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise contradiction(f"max_window_layers = {first!r}", "a whole number")
    implied: list[LayerType] = [
        "sliding_attention" if slides and i >= first else "full_attention" for i in range(num_layers)
    ]
    listed = explicit_layer_types(config, num_layers)
    if listed is None or listed == implied:
        return implied
    if variant.windows != "from_max_window_layers":
        raise unsupported("layer_types unlike those of the model type", f"{variant.windows} of the layers sliding")
    return listed if slides else implied


def _llama3_rope(plain: RopeSpec, factors: torch.Tensor) -> RopeSpec:
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


class Llama(Family):
    model_types = tuple(VARIANTS)
    # Mistral's GGUF files call themselves llama.
    architectures = ("llama", "qwen2", "qwen3")

    def spec_from_hf(self, config: Mapping[str, Any]) -> ModelSpec:
        model_type = config["model_type"]
        variant = VARIANTS[model_type]
        config = {**variant.defaults, **config}
        num_layers, heads = positive(config, "num_hidden_layers"), positive(config, "num_attention_heads")
        hidden_size, max_positions = positive(config, "hidden_size"), positive(config, "max_position_embeddings")
        head_dim = hidden_size // heads if config["head_dim"] is None else positive(config, "head_dim")
        attention_bias = config["attention_bias"] if variant.qkv_bias is None else variant.qkv_bias
        common = {
            "num_attention_heads": heads,
            "num_key_value_heads": heads
            if config["num_key_value_heads"] is None
            else positive(config, "num_key_value_heads"),
            "head_dim": head_dim,
            "scale": head_dim**-0.5,
            "qk_norm": variant.qk_norm,
            "qkv_bias": attention_bias,
            "output_bias": attention_bias if variant.qkv_bias is None else False,
        }
        layer_types = _layer_types(config, variant, num_layers)
        feed_forward = MLPSpec(
            intermediate_size=positive(config, "intermediate_size"),
            activation=activation(config["hidden_act"]),
            bias=config["mlp_bias"] if variant.mlp_bias else False,
        )
        layers = {
            kind: LayerSpec(
                mixer=AttentionSpec(
                    **common,
                    window=window_length(config["sliding_window"]) if kind == "sliding_attention" else None,
                    rope=rope_spec(rope_parameters(config, kind, THETA), head_dim, max_positions),
                ),
                feed_forward=feed_forward,
            )
            for kind in set(layer_types)
        }
        return ModelSpec(
            family=model_type,
            vocab_size=positive(config, "vocab_size"),
            hidden_size=hidden_size,
            layers=tuple(layers[kind] for kind in layer_types),
            norm_eps=positive_number(config, "rms_norm_eps"),
            tie_word_embeddings=config["tie_word_embeddings"],
            max_position_embeddings=max_positions,
        )

    def target_from_hf(self, key: str, spec: ModelSpec) -> Target | None:
        name = _HF.name(key.removeprefix("model."))
        return None if name is None else Target(name)

    def is_ignored_hf(self, key: str) -> bool:
        return _HF.is_ignored(key)

    def spec_from_gguf(
        self, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], read: ReadTensor
    ) -> ModelSpec:
        meta = GGUFMetadata(metadata, COMMON_GGUF_KEYS)
        variant = VARIANTS[meta.architecture]
        hidden_size, heads = meta.integer("embedding_length"), meta.integer("attention.head_count")
        head_dim = meta.integer("attention.key_length", hidden_size // heads)
        rope = meta.rope(head_dim)
        if "rope_freqs.weight" in shapes:
            rope = _llama3_rope(rope, read("rope_freqs.weight"))
        layer = LayerSpec(
            mixer=AttentionSpec(
                num_attention_heads=heads,
                num_key_value_heads=meta.integer("attention.head_count_kv", heads),
                head_dim=head_dim,
                window=None,
                scale=head_dim**-0.5,
                rope=rope,
                qk_norm=variant.qk_norm,
                # The metadata is silent about biases; the table of tensors is not.
                qkv_bias="blk.0.attn_q.bias" in shapes,
                output_bias="blk.0.attn_output.bias" in shapes,
            ),
            feed_forward=MLPSpec(
                intermediate_size=meta.integer("feed_forward_length"),
                activation="silu",
                bias="blk.0.ffn_gate.bias" in shapes,
            ),
        )
        return ModelSpec(
            family=meta.architecture,
            vocab_size=gguf_vocab_size(metadata, shapes),
            hidden_size=hidden_size,
            layers=(layer,) * meta.integer("block_count"),
            norm_eps=meta.number("attention.layer_norm_rms_epsilon"),
            tie_word_embeddings="output.weight" not in shapes,
            max_position_embeddings=meta.integer("context_length"),
        )

    def target_from_gguf(self, key: str, spec: ModelSpec) -> Target | None:
        name = _GGUF.name(key)
        if name is None:
            return None
        projection = name.split(".")[-2]
        if spec.family != "llama" or projection not in ("q_proj", "k_proj"):
            return Target(name)
        mixer = spec.layers[0].mixer
        assert isinstance(mixer, AttentionSpec)
        heads = mixer.num_attention_heads if projection == "q_proj" else mixer.num_key_value_heads
        return Target(name, lambda tensor: unpermute(tensor, heads))

    def is_ignored_gguf(self, key: str) -> bool:
        return _GGUF.is_ignored(key)
