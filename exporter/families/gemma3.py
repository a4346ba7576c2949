"""Gemma 3 (text), and the text half of the multimodal Gemma 3.

Meaning of the config: ``transformers.models.gemma3``. Five sliding layers, then a global one; sliding layers rotate
with base 10000, never scaled, global ones with base 1e6, scaled on the larger models. The embedding is multiplied by
sqrt(hidden_size): Transformers keeps the factor as a float32 tensor, which multiplies a float32 weight exactly as the
Python number does. RMSNorm stores w and multiplies by 1 + w; a GGUF file has the 1 folded in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from exporter.families.base import (
    ATTENTION_GGUF,
    ATTENTION_HF,
    FINAL_NORM_HF,
    IGNORED_HF,
    MLP_GGUF,
    MLP_HF,
    POST_NORMS_GGUF,
    POST_NORMS_HF,
    QK_NORM_GGUF,
    QK_NORM_HF,
    TABLES_HF,
    TOP_GGUF,
    Described,
    Family,
    ReadTensor,
    Shapes,
)
from exporter.families.gguf import COMMON_KEYS, GGUFMetadata
from exporter.families.reading import (
    LAYER_TYPES,
    LayerType,
    contradiction,
    explicit_layer_types,
    filled,
    mlp_spec,
    model_fields,
    one_type,
    optional_number,
    pattern_layer_types,
    positive,
    positive_number,
    refuse_dropped,
    refuse_flags,
    rope_spec,
    section,
    unsupported,
    window_length,
)
from exporter.families.tensors import Add, Names, stepped, tensor_table
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

_HF: Names = {**ATTENTION_HF, **MLP_HF, **stepped(QK_NORM_HF | POST_NORMS_HF, Add(1.0))}
_TOP_HF: Names = {**TABLES_HF, **stepped(FINAL_NORM_HF, Add(1.0))}
_GGUF: Names = ATTENTION_GGUF | MLP_GGUF | QK_NORM_GGUF | POST_NORMS_GGUF
_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
_VISION = r"(?:model\.)?(?:vision_tower|multi_modal_projector)\..+"
_GGUF_KEYS = COMMON_KEYS | {
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attention.scale",
    "rope.freq_base_swa",
    "final_logit_softcapping",
    "attn_logit_softcapping",
}


def _model_spec(  # one place builds the spec of both formats
    *,
    layer_types: Sequence[LayerType],
    ropes: Mapping[LayerType, RopeSpec],
    window: int | None,
    attention: Sequence[Mapping[str, Any]],
    feed_forward: Sequence[MLPSpec],
    **model: Any,
) -> ModelSpec:
    layers = tuple(
        LayerSpec(
            mixer=AttentionSpec(
                **fields, window=window if kind == "sliding_attention" else None, rope=ropes[kind], qk_norm=True
            ),
            feed_forward=mlp,
            post_norms=True,
        )
        for kind, fields, mlp in zip(layer_types, attention, feed_forward, strict=True)
    )
    return ModelSpec(family="gemma3", embedding_scale=model["hidden_size"] ** 0.5, layers=layers, **model)


def _from_hf(config: Mapping[str, Any]) -> Described:
    if "text_config" in config:
        # The outer config's tie applies to the whole model; the text half's own wins when it speaks.
        outer = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        config = {**outer, **section(config, "text_config")}
    config = {**DEFAULTS, **config}
    refuse_flags(config, ("use_bidirectional_attention",))
    num_layers, head_dim = positive(config, "num_hidden_layers"), positive(config, "head_dim")
    layer_types = explicit_layer_types(config, num_layers)
    if layer_types is None:
        pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", PATTERN))
        layer_types = pattern_layer_types(pattern, num_layers)
    attention = {
        "num_attention_heads": positive(config, "num_attention_heads"),
        "num_key_value_heads": positive(config, "num_key_value_heads"),
        "head_dim": head_dim,
        "scale": positive_number(config, "query_pre_attn_scalar") ** -0.5,
        "qkv_bias": config["attention_bias"],
        "output_bias": config["attention_bias"],
        "logit_softcap": optional_number(config, "attn_logit_softcapping"),
    }
    fields = model_fields(config)
    spec = _model_spec(
        layer_types=layer_types,
        ropes={kind: rope_spec(_rope(config, kind), head_dim, fields["max_position_embeddings"]) for kind in THETA},
        window=window_length(config["sliding_window"]),
        attention=[attention] * num_layers,
        feed_forward=[mlp_spec(config, "hidden_activation")] * num_layers,
        final_logit_softcap=optional_number(config, "final_logit_softcapping"),
        **fields,
    )
    ignored = (*IGNORED_HF, _VISION)
    return Described(
        tensor_table(spec, lambda layer: _HF, _TOP_HF, layers="layers", prefixes=_PREFIXES, ignored=ignored), spec
    )


def _rope(config: Mapping[str, Any], kind: LayerType) -> dict[str, Any]:
    """`rope_parameters` has a dictionary for each kind of layer; ``rope_theta`` and ``rope_scaling`` speak of the
    global layers, ``rope_local_base_freq`` of the others (``Gemma3TextConfig.convert_rope_params_to_dict``).

    Raises:
        CheckpointError: a value that Transformers does not read, and that is not what it takes in its place.
        UnsupportedModelError: ``rope_scaling`` for each kind of layer.
    """
    parameters, scaling = section(config, "rope_parameters"), section(config, "rope_scaling")
    own = one_type(section(parameters, kind), f"rope_parameters.{kind}")
    longest = {"original_max_position_embeddings": config["max_position_embeddings"]}
    if kind == "sliding_attention":
        return _read_truncate(filled(longest | own, config, config.get("rope_local_base_freq"), THETA[kind]))
    if any(key in scaling for key in LAYER_TYPES):
        raise unsupported("rope_scaling for each kind of layer", "rope_parameters for each kind of layer")
    old = scaling.get("type")
    if "rope_type" not in scaling and old is not None and old != own.get("rope_type", "default"):
        raise contradiction(f'"type": "{old}" in rope_scaling', '"rope_type", which alone is read in this model type')
    counts = own | one_type(scaling, "rope_scaling")
    refuse_dropped(own, counts, "rope_parameters.full_attention", "rope_scaling")
    result = filled(longest | counts, config, config.get("rope_theta"), THETA[kind])
    flat = {key: value for key, value in parameters.items() if key not in LAYER_TYPES}
    where = "rope_parameters, for no kind of layer,"
    refuse_dropped(one_type(flat, "rope_parameters"), result, where, "what is read of the global layers")
    return _read_truncate(result)


def _read_truncate(parameters: dict[str, Any]) -> dict[str, Any]:
    """Transformers looks for YaRN's `truncate` where a model type with one rotation has it, and so finds none."""
    if parameters.get("truncate", True) is not True:
        raise unsupported("a RoPE parameter truncate = false", "true, in this model type")
    return parameters


def _from_gguf(metadata: Mapping[str, Any], shapes: Shapes, read: ReadTensor) -> Described:
    meta = GGUFMetadata(metadata, shapes, _GGUF_KEYS)
    fields, attention = meta.model_fields(), meta.attention(head_dim=256)
    heads, head_dim = attention[0]["num_attention_heads"], attention[0]["head_dim"]
    default_scale = (fields["hidden_size"] / heads if meta.num_layers == _LAYERS_27B else head_dim) ** -0.5
    caps = {key: meta.get(key) for key in ("attn_logit_softcapping", "final_logit_softcapping")}
    own = {
        "scale": meta.number("attention.scale", default_scale),
        "logit_softcap": optional_number(caps, "attn_logit_softcapping"),
    }
    global_rope = meta.rope(head_dim)
    local_theta = meta.number("rope.freq_base_swa", THETA["sliding_attention"])
    spec = _model_spec(
        layer_types=meta.layer_types(PATTERN),
        ropes={
            "full_attention": global_rope,
            "sliding_attention": RopeSpec(theta=local_theta, rotary_dim=global_rope.rotary_dim),
        },
        window=window_length(meta.get("attention.sliding_window")),
        attention=[layer | own for layer in attention],
        feed_forward=[
            MLPSpec(intermediate_size=size, activation="gelu_tanh") for size in meta.integers("feed_forward_length")
        ],
        final_logit_softcap=optional_number(caps, "final_logit_softcapping"),
        **fields,
    )
    return Described(tensor_table(spec, lambda layer: _GGUF, TOP_GGUF, layers="blk"), spec)


FAMILY = Family(
    model_types=("gemma3", "gemma3_text"),
    from_hf=_from_hf,
    architectures=("gemma3",),
    from_gguf=_from_gguf,
)
