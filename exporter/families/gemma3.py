"""Gemma 3 (text), and the text half of the multimodal Gemma 3.

Meaning of the config: ``transformers.models.gemma3``. Five sliding layers, then a global one; sliding layers rotate
with base 10000, never scaled, global ones with base 1e6, scaled on the larger models. The embedding is multiplied by
sqrt(hidden_size): Transformers keeps the factor as a float32 tensor, which multiplies a float32 weight exactly as the
Python number does. RMSNorm stores w and multiplies by 1 + w.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    explicit_layer_types,
    gguf_vocab_size,
    optional_number,
    pattern_layer_types,
    positive,
    positive_number,
    refuse_flags,
    rope_parameters,
    rope_spec,
    section,
    window_length,
)
from exporter.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, RopeSpec

# What Transformers' Gemma3TextConfig assumes; the multimodal configs rely on it for most of their text half.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
PATTERN = 6
THETA: dict[LayerType, float] = {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0}

# The 27B model alone scales by sqrt(hidden_size / heads); a GGUF file says which model it is by its depth only.
_LAYERS_27B = 62

_HF = NameMap(
    layer=ATTENTION_HF
    | QK_NORM_HF
    | MLP_HF
    | {
        "input_layernorm.weight": "input_norm.weight",
        "post_attention_layernorm.weight": "post_mixer_norm.weight",
        "pre_feedforward_layernorm.weight": "feed_forward_norm.weight",
        "post_feedforward_layernorm.weight": "post_feed_forward_norm.weight",
    },
    top=TOP_HF,
    ignored=(*IGNORED_HF, r"(?:model\.)?(?:vision_tower|multi_modal_projector)\..+"),
)
_GGUF = NameMap(
    layer=ATTENTION_GGUF
    | QK_NORM_GGUF
    | MLP_GGUF
    | {
        "attn_norm.weight": "input_norm.weight",
        "post_attention_norm.weight": "post_mixer_norm.weight",
        "ffn_norm.weight": "feed_forward_norm.weight",
        "post_ffw_norm.weight": "post_feed_forward_norm.weight",
    },
    top=TOP_GGUF,
)
_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
_GGUF_KEYS = COMMON_GGUF_KEYS | {
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attention.scale",
    "rope.freq_base_swa",
    "final_logit_softcapping",
    "attn_logit_softcapping",
}


def _add_one(weight: torch.Tensor) -> torch.Tensor:
    return weight + 1.0


def _model_spec(  # one place builds the spec of both formats
    *,
    layer_types: list[LayerType],
    ropes: Mapping[LayerType, RopeSpec],
    window: int | None,
    attention: Mapping[str, Any],
    feed_forward: MLPSpec,
    hidden_size: int,
    **model: Any,
) -> ModelSpec:
    mixers = {
        kind: AttentionSpec(
            **attention, window=window if kind == "sliding_attention" else None, rope=ropes[kind], qk_norm=True
        )
        for kind in ropes
    }
    return ModelSpec(
        family="gemma3",
        hidden_size=hidden_size,
        embedding_scale=hidden_size**0.5,
        layers=tuple(LayerSpec(mixer=mixers[kind], feed_forward=feed_forward, post_norms=True) for kind in layer_types),
        **model,
    )


class Gemma3(Family):
    model_types = ("gemma3", "gemma3_text")
    architectures = ("gemma3",)

    def spec_from_hf(self, config: Mapping[str, Any]) -> ModelSpec:
        if "text_config" in config:
            # The outer config's tie applies to the whole model; the text half's own wins when it speaks.
            outer = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
            config = {**outer, **section(config, "text_config")}
        config = {**DEFAULTS, **config}
        refuse_flags(config, ("use_bidirectional_attention",))
        num_layers = positive(config, "num_hidden_layers")
        layer_types = explicit_layer_types(config, num_layers)
        if layer_types is None:
            pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", PATTERN))
            layer_types = pattern_layer_types(pattern, num_layers)
        head_dim = positive(config, "head_dim")
        max_positions = positive(config, "max_position_embeddings")
        return _model_spec(
            layer_types=layer_types,
            ropes={kind: rope_spec(self._rope(config, kind), head_dim, max_positions) for kind in THETA},
            window=window_length(config["sliding_window"]),
            attention={
                "num_attention_heads": positive(config, "num_attention_heads"),
                "num_key_value_heads": positive(config, "num_key_value_heads"),
                "head_dim": head_dim,
                "scale": positive_number(config, "query_pre_attn_scalar") ** -0.5,
                "qkv_bias": config["attention_bias"],
                "output_bias": config["attention_bias"],
                "logit_softcap": optional_number(config, "attn_logit_softcapping"),
            },
            feed_forward=MLPSpec(
                intermediate_size=positive(config, "intermediate_size"),
                activation=activation(config["hidden_activation"]),
            ),
            hidden_size=positive(config, "hidden_size"),
            vocab_size=positive(config, "vocab_size"),
            norm_eps=positive_number(config, "rms_norm_eps"),
            tie_word_embeddings=config["tie_word_embeddings"],
            final_logit_softcap=optional_number(config, "final_logit_softcapping"),
            max_position_embeddings=max_positions,
        )

    @staticmethod
    def _rope(config: Mapping[str, Any], kind: LayerType) -> dict[str, Any]:
        """Flat spellings (`rope_theta`, `rope_scaling`, flat `rope_parameters`) speak of the global layers only."""
        nested = section(config, "rope_parameters")
        if kind == "full_attention":
            parameters = rope_parameters(config, kind, THETA[kind])
        else:
            local = {
                "rope_theta": config.get("rope_local_base_freq"),
                "rope_parameters": nested if kind in nested else None,
                "max_position_embeddings": config["max_position_embeddings"],
            }
            parameters = rope_parameters(local, kind, THETA[kind])
        return parameters

    def target_from_hf(self, key: str, spec: ModelSpec) -> Target | None:
        prefix = next((prefix for prefix in _PREFIXES if key.startswith(prefix)), "")
        name = _HF.name(key.removeprefix(prefix))
        if name is None:
            return None
        is_norm = name.rsplit(".", 1)[0].endswith("norm")
        return Target(name, _add_one if is_norm else None)

    def is_ignored_hf(self, key: str) -> bool:
        return _HF.is_ignored(key)

    def spec_from_gguf(
        self, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], read: ReadTensor
    ) -> ModelSpec:
        meta = GGUFMetadata(metadata, _GGUF_KEYS)
        num_layers, hidden_size = meta.integer("block_count"), meta.integer("embedding_length")
        heads = meta.integer("attention.head_count")
        head_dim = meta.integer("attention.key_length", 256)
        pattern = meta.get("attention.sliding_window_pattern", PATTERN)
        layer_types: list[LayerType]
        if isinstance(pattern, list):
            layer_types = ["sliding_attention" if slides else "full_attention" for slides in pattern]
        else:
            layer_types = pattern_layer_types(pattern, num_layers)
        default_scale = (hidden_size / heads if num_layers == _LAYERS_27B else head_dim) ** -0.5
        global_rope = meta.rope(head_dim)
        local_rope = RopeSpec(
            theta=meta.number("rope.freq_base_swa", THETA["sliding_attention"]), rotary_dim=global_rope.rotary_dim
        )
        caps = {key: meta.get(key) for key in ("attn_logit_softcapping", "final_logit_softcapping")}
        return _model_spec(
            layer_types=layer_types,
            ropes={"full_attention": global_rope, "sliding_attention": local_rope},
            window=window_length(meta.get("attention.sliding_window")),
            attention={
                "num_attention_heads": heads,
                "num_key_value_heads": meta.integer("attention.head_count_kv", heads),
                "head_dim": head_dim,
                "scale": meta.number("attention.scale", default_scale),
                "logit_softcap": optional_number(caps, "attn_logit_softcapping"),
            },
            feed_forward=MLPSpec(intermediate_size=meta.integer("feed_forward_length"), activation="gelu_tanh"),
            hidden_size=hidden_size,
            vocab_size=gguf_vocab_size(metadata, shapes),
            norm_eps=meta.number("attention.layer_norm_rms_epsilon"),
            tie_word_embeddings="output.weight" not in shapes,
            final_logit_softcap=optional_number(caps, "final_logit_softcapping"),
            max_position_embeddings=meta.integer("context_length"),
        )

    def target_from_gguf(self, key: str, spec: ModelSpec) -> Target | None:
        # The converter folded the norms' 1 in.
        name = _GGUF.name(key)
        return None if name is None else Target(name)

    def is_ignored_gguf(self, key: str) -> bool:
        return _GGUF.is_ignored(key)
