"""Tiny random models of Transformers, written as the checkpoints people have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from exporter.config import CheckpointConfig
from exporter.model.decoder import Decoder
from exporter.spec import CachePolicy, ModelSpec, state_specs

COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
WINDOWED = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"num_hidden_layers": 6, "sliding_window": 8, "query_pre_attn_scalar": 32,
                    "final_logit_softcapping": 5.0},
    "llama": {"num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True, "rope_theta": 500000.0},
    "mistral": {"num_hidden_layers": 2, "sliding_window": 8},
    "qwen2": {"num_hidden_layers": 2, **WINDOWED},
    "qwen3": {"num_hidden_layers": 2, **WINDOWED},
}  # fmt: skip


def tiny_model(model_type: str, **changes: Any) -> Any:
    """A model whose every parameter is random: norms and biases too, which Transformers sets to 0 or 1."""
    config = AutoConfig.for_model(model_type, **(COMMON | CONFIGS[model_type] | changes))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model


def at(path: Path, **config: Any) -> CheckpointConfig:
    return CheckpointConfig(path=path, **config)


def decoder_logits(spec: ModelSpec, state_dict: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    """Logits [T, V], one token after the other, from the exporter's decoder."""
    decoder = Decoder(spec, state_specs(spec, CachePolicy(initial_rows=64), 64))
    if spec.tie_word_embeddings:
        state_dict = state_dict | {"lm_head.weight": state_dict["embed_tokens.weight"]}
    decoder.load_state_dict(state_dict)
    states = [torch.zeros(state.shape()) for state in decoder.states]
    with torch.no_grad():
        rows = [
            decoder(torch.tensor([[token]]), torch.arange(i + 1)[None], states, write_first=True)
            for i, token in enumerate(ids)
        ]
    return torch.cat(rows)


def llama_cpp_permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """The order llama.cpp's converter gives to Llama's query and key rows, row by row: the halves interleave."""
    head_dim = len(weight) // heads
    out = np.empty_like(weight)
    for head in range(heads):
        for i in range(head_dim // 2):
            out[head * head_dim + 2 * i] = weight[head * head_dim + i]
            out[head * head_dim + 2 * i + 1] = weight[head * head_dim + head_dim // 2 + i]
    return out


NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_LAYER_NAMES = LAYER_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_tensors(model: Any) -> dict[str, np.ndarray]:
    """The tensors as llama.cpp's converter would store them, float32."""
    config = model.config
    gemma = config.model_type == "gemma3_text"
    layer_names = GEMMA_LAYER_NAMES if gemma else LAYER_NAMES
    tensors: dict[str, np.ndarray] = {}
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        value = tensor.numpy()
        if gemma and "norm" in key:
            value = value + np.float32(1)
        if config.model_type == "llama" and ".q_proj" in key:
            value = llama_cpp_permute(value, config.num_attention_heads)
        if config.model_type == "llama" and ".k_proj" in key:
            value = llama_cpp_permute(value, config.num_key_value_heads)
        if key in NAMES:
            tensors[NAMES[key]] = value
        else:
            _, _, layer, *middle, kind = key.split(".")
            tensors[f"blk.{layer}.{layer_names['.'.join(middle)]}.{kind}"] = value
    return tensors


def write_gguf(
    path: Path,
    model: Any,
    *,
    types: dict[str, gguf.GGMLQuantizationType] | None = None,
    drop: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
    tokens: int = 0,
) -> Path:
    """Write `model` as GGUF; `types` quantises tensors by name, `drop` and `extra` damage the table."""
    config = model.config
    architecture = {"gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    parameters = config.rope_parameters
    writer.add_rope_freq_base(parameters.get("full_attention", parameters)["rope_theta"])
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        if config.final_logit_softcapping is not None:
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if tokens:
        writer.add_token_list([f"t{i}" for i in range(tokens)])
    for name, value in (gguf_tensors(model) | (extra or {})).items():
        if name in drop:
            continue
        if types and name in types:
            writer.add_tensor(name, gguf.quants.quantize(value, types[name]), raw_dtype=types[name])
        else:
            writer.add_tensor(name, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
