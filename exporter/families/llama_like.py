"""Families that differ from Llama in data only: one call makes a `Family` of that data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from exporter.families.base import (
    ATTENTION_GGUF,
    ATTENTION_HF,
    FINAL_NORM_HF,
    IGNORED_HF,
    MLP_GGUF,
    MLP_HF,
    NORMS_GGUF,
    NORMS_HF,
    QK_NORM_GGUF,
    QK_NORM_HF,
    TABLES_HF,
    TOP_GGUF,
    Described,
    Family,
    ReadTensor,
    Shapes,
)
from exporter.families.gguf import COMMON_KEYS, GGUFMetadata, llama3_rope
from exporter.families.reading import (
    LayerType,
    attention_fields,
    mlp_spec,
    model_fields,
    positive,
    rope_parameters,
    rope_spec,
    window_length,
)
from exporter.families.tensors import Names, tensor_table
from exporter.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec

THETA = 10_000.0
# Those of Transformers' LlamaConfig that the other config classes share; a family adds its own.
COMMON_DEFAULTS: dict[str, Any] = {
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
HF_NAMES = ATTENTION_HF | QK_NORM_HF | MLP_HF | NORMS_HF
GGUF_NAMES = ATTENTION_GGUF | QK_NORM_GGUF | MLP_GGUF | NORMS_GGUF


def llama_like(
    model_type: str,
    *,
    defaults: Mapping[str, Any],
    layer_types: Callable[[Mapping[str, Any], int], list[LayerType]],
    qkv_bias: bool = False,
    qk_norm: bool = False,
    hf_names: Callable[[LayerSpec], Names] = lambda layer: HF_NAMES,
    gguf: bool = True,
    gguf_names: Callable[[LayerSpec], Names] = lambda layer: GGUF_NAMES,
) -> Family:
    """A family of Llama's arithmetic.

    Args:
        model_type: Hugging Face's name for it, and GGUF's where `gguf` files of its own exist.
        defaults: what its config class assumes. Where `attention_bias` (of all four projections) and `mlp_bias` are not
            among them, a config's are not read.
        layer_types: which layers slide (`exporter.families.reading`).
        qkv_bias: whether the projections before attention have biases whatever the config says.
        qk_norm: whether queries and keys are normed.
        hf_names, gguf_names: what the tensors of a layer are called and what they bring.
    """

    def from_hf(config: Mapping[str, Any]) -> Described:
        config = {**defaults, **config}
        attention = attention_fields(config)
        attention_bias = config["attention_bias"] if "attention_bias" in defaults else False
        mlp_bias = config["mlp_bias"] if "mlp_bias" in defaults else False
        types = layer_types(config, positive(config, "num_hidden_layers"))
        layers = {
            kind: LayerSpec(
                mixer=AttentionSpec(
                    **attention,
                    window=window_length(config.get("sliding_window")) if kind == "sliding_attention" else None,
                    rope=rope_spec(
                        rope_parameters(config, THETA),
                        attention["head_dim"],
                        positive(config, "max_position_embeddings"),
                    ),
                    qk_norm=qk_norm,
                    qkv_bias=qkv_bias or attention_bias,
                    output_bias=attention_bias,
                ),
                feed_forward=mlp_spec(config, "hidden_act", bias=mlp_bias),
            )
            for kind in set(types)
        }
        spec = ModelSpec(family=model_type, layers=tuple(layers[kind] for kind in types), **model_fields(config))
        tensors = tensor_table(
            spec, hf_names, TABLES_HF | FINAL_NORM_HF, layers="layers", prefixes=("model.",), ignored=IGNORED_HF
        )
        return Described(tensors, spec)

    def from_gguf(metadata: Mapping[str, Any], shapes: Shapes, read: ReadTensor) -> Described:
        meta = GGUFMetadata(metadata, shapes, COMMON_KEYS)
        attention = meta.attention()
        rope = meta.rope(attention[0]["head_dim"])
        if "rope_freqs.weight" in shapes:
            rope = llama3_rope(rope, read("rope_freqs.weight"))
        layers = [
            LayerSpec(
                mixer=AttentionSpec(
                    **fields,
                    window=None,
                    rope=rope,
                    qk_norm=qk_norm,
                    # The metadata is silent about biases; the table of tensors is not.
                    qkv_bias="blk.0.attn_q.bias" in shapes,
                    output_bias="blk.0.attn_output.bias" in shapes,
                ),
                feed_forward=MLPSpec(intermediate_size=size, activation="silu", bias="blk.0.ffn_gate.bias" in shapes),
            )
            for fields, size in zip(attention, meta.integers("feed_forward_length"), strict=True)
        ]
        spec = ModelSpec(family=model_type, layers=tuple(layers), **meta.model_fields())
        # Both hold RoPE frequencies; `llama3_rope` has understood or refused the first.
        ignored = (r"rope_freqs\.weight", r"blk\.\d+\.attn_rot_embd\.weight")
        return Described(tensor_table(spec, gguf_names, TOP_GGUF, layers="blk", ignored=ignored), spec)

    return Family(
        model_types=(model_type,),
        from_hf=from_hf,
        architectures=(model_type,) if gguf else (),
        from_gguf=from_gguf if gguf else None,
    )
