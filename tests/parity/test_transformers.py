"""Tiny random models of Transformers in every split: Gemma 3's variants, and families that no reader knows yet.

The latter are mapped by hand and show what `ModelSpec` can already say.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import KERNELS, kernels_named, one_thread, play, states_of, token_ids  # noqa: F401
from transformers import AutoConfig, AutoModelForCausalLM

from exporter.checkpoint import open_checkpoint
from exporter.config import CheckpointConfig
from exporter.families.reading import rope_parameters, rope_spec
from exporter.model.decoder import Decoder, parameter_shapes
from exporter.spec import (
    AttentionSpec,
    CachePolicy,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    RopeSpec,
    ShortConvSpec,
    state_specs,
)
from exporter.verification.transformers import TransformersReference

StateDict = dict[str, torch.Tensor]
LENGTH = 44
RELATIVE = 5e-6  # of the largest logit
COMMON = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 97, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
MIXER = {
    f"self_attn.{p}_proj.{kind}": f"mixer.{p}_proj.{kind}" for p in "qkvo" for kind in ("weight", "bias")
}  # fmt: skip
NORMS = {"input_layernorm.weight": "input_norm.weight", "post_attention_layernorm.weight": "feed_forward_norm.weight"}


def tiny(model_type: str, **config: Any) -> Any:
    """A model whose every parameter is random, norms, biases, sinks and routers too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **(COMMON | config)), attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model


def rope_of(config: Any) -> RopeSpec:
    as_file = config.to_dict()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return rope_spec(rope_parameters(as_file, 1e4), head_dim, config.max_position_embeddings)


def attention_of(config: Any, window: int | None = None, **changes: Any) -> AttentionSpec:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    fields = {
        "num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads,
        "head_dim": head_dim, "scale": head_dim**-0.5, "window": window, "rope": rope_of(config),
    }  # fmt: skip
    return AttentionSpec(**(fields | changes))


def window_of(config: Any, index: int) -> int | None:
    return config.sliding_window if config.layer_types[index] == "sliding_attention" else None


def spec_of(config: Any, layers: list[LayerSpec], **changes: Any) -> ModelSpec:
    fields = {
        "family": config.model_type, "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "norm_eps": getattr(config, "rms_norm_eps", None) or config.norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings, "max_position_embeddings": config.max_position_embeddings,
    }  # fmt: skip
    return ModelSpec(**(fields | changes), layers=tuple(layers))


def renamed(model: Any, layer_names: dict[str, str], top: dict[str, str] | None = None) -> StateDict:
    """The state dict under the decoder's names; every tensor must be in the table."""
    top = {"embed_tokens.weight": "embed_tokens.weight", "norm.weight": "norm.weight",
           "lm_head.weight": "lm_head.weight"} | (top or {})  # fmt: skip
    state: StateDict = {}
    for key, tensor in model.state_dict().items():
        name = key.removeprefix("model.")
        if name.startswith("layers."):
            _, index, inner = name.split(".", 2)
            state[f"layers.{index}.{layer_names[inner]}"] = tensor
        else:
            state[top[name]] = tensor
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def assert_logits_of(model: Any, spec: ModelSpec, state: StateDict) -> None:
    """Every token's logits, in three splits and with both kernels, over states that start as NaN."""
    ids = token_ids(LENGTH)
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0]
    assert theirs.abs().max() > 0.5
    for name in KERNELS:
        states = state_specs(spec, CachePolicy(), LENGTH)
        decoder = Decoder.from_state_dict(spec, states, kernels_named(name), state)
        for splits in ([1] * LENGTH, [5, 20, 1, 9, 1, 1, 7], [LENGTH]):
            for position, logits in play(decoder, ids, splits, states_of(decoder, float("nan"))).items():
                difference = (logits - theirs[position]).abs().max() / theirs.abs().max()
                assert difference <= RELATIVE, (name, splits, position, float(difference))


@pytest.mark.parametrize(
    "changes",
    [
        {"final_logit_softcapping": 5.0},
        {"final_logit_softcapping": 30.0},
        {"layer_types": ["sliding_attention"] * 6},
        {"layer_types": ["full_attention"] * 6},
        {"num_key_value_heads": 1, "head_dim": 24, "query_pre_attn_scalar": 168},
        {"sliding_window": 1, "tie_word_embeddings": False},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ],
)
def test_gemma3_variants(tmp_path: Path, changes: dict[str, Any]) -> None:
    base = {"num_hidden_layers": 6, "sliding_window": 8, "query_pre_attn_scalar": 32}
    model = tiny("gemma3_text", **(base | changes))
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(CheckpointConfig(path=tmp_path))
    state = checkpoint.load_state_dict(parameter_shapes(checkpoint.spec))
    assert_logits_of(model, checkpoint.spec, state)


@pytest.mark.parametrize("picked", [1, 3])
def test_gpt_oss(picked: int) -> None:
    """Sinks, biases, experts chosen before the softmax, clamped SwiGLU, YaRN, every other layer sliding."""
    model = tiny(
        "gpt_oss", num_hidden_layers=4, num_local_experts=5, num_experts_per_tok=picked, sliding_window=8,
        intermediate_size=32, layer_types=ALTERNATING, swiglu_limit=0.8,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 16,
        },
    )  # fmt: skip
    config = model.config
    feed_forward = MoESpec(
        num_experts=5, num_experts_per_tok=picked, intermediate_size=32, activation="silu", routing="topk_softmax",
        router_bias=True, expert_bias=True, clamp_limit=config.swiglu_limit,
    )  # fmt: skip
    layers = [
        LayerSpec(
            mixer=attention_of(config, window_of(config, i), qkv_bias=True, output_bias=True, sinks=True),
            feed_forward=feed_forward,
        )
        for i in range(4)
    ]
    names = MIXER | NORMS | {"self_attn.sinks": "mixer.sinks"}
    names |= {f"mlp.router.{kind}": f"feed_forward.router.{kind}" for kind in ("weight", "bias")}
    experts = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
    state = renamed(model, names | {f"mlp.experts.{name}": f"feed_forward.experts.{name}" for name in experts})
    for i in range(4):
        at = f"layers.{i}.feed_forward.experts."
        fused, fused_bias = state.pop(at + "gate_up_proj"), state.pop(at + "gate_up_proj_bias")
        for offset, half in enumerate(("gate", "up")):  # columns of gate and up alternate; all are [E, in, out]
            state[f"{at}{half}_proj"] = fused[..., offset::2].transpose(1, 2).contiguous()
            state[f"{at}{half}_bias"] = fused_bias[..., offset::2].contiguous()
        state[at + "down_proj"] = state[at + "down_proj"].transpose(1, 2).contiguous()
        state[at + "down_bias"] = state.pop(at + "down_proj_bias")
    spec = spec_of(config, layers)
    rope = spec.layers[0].mixer.rope
    assert rope is not None and rope.scaling == "yarn" and not rope.truncate
    assert_logits_of(model, spec, state)


@pytest.mark.parametrize(("model_type", "normalize"), [("qwen3_moe", True), ("qwen3_moe", False), ("mixtral", True)])
def test_experts_chosen_after_the_softmax(model_type: str, normalize: bool) -> None:
    qwen = model_type == "qwen3_moe"
    model = (
        tiny(model_type, num_hidden_layers=2, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32,
             norm_topk_prob=normalize)
        if qwen
        else tiny(model_type, num_hidden_layers=2, num_local_experts=6, num_experts_per_tok=2, intermediate_size=32,
                  sliding_window=8)
    )  # fmt: skip
    config = model.config
    layer = LayerSpec(
        mixer=attention_of(config, None if qwen else 8, qk_norm=qwen),
        feed_forward=MoESpec(
            num_experts=6, num_experts_per_tok=2, intermediate_size=32, activation="silu", routing="softmax_topk",
            normalize_topk=normalize,
        ),
    )  # fmt: skip
    names = MIXER | NORMS | {f"self_attn.{x}_norm.weight": f"mixer.{x}_norm.weight" for x in "qk"}
    names |= {"mlp.gate.weight": "feed_forward.router.weight"}
    names |= {f"mlp.experts.{name}": f"feed_forward.experts.{name}" for name in ("gate_up_proj", "down_proj")}
    state = renamed(model, names)
    for i in range(2):
        at = f"layers.{i}.feed_forward.experts."
        state[at + "gate_proj"], state[at + "up_proj"] = state.pop(at + "gate_up_proj").chunk(2, 1)
    assert_logits_of(model, spec_of(config, [layer] * 2), state)


@pytest.mark.parametrize("bias", [False, True])
def test_lfm2(bias: bool) -> None:
    """Short convolutions between attention layers with query and key norms."""
    types = ["conv", "full_attention", "conv", "conv", "full_attention"]
    model = tiny(
        "lfm2", num_hidden_layers=5, layer_types=types, conv_L_cache=3, conv_bias=bias, block_auto_adjust_ff_dim=False,
        norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    config = model.config
    feed_forward = MLPSpec(intermediate_size=96, activation="silu")
    mixers = {
        "conv": ShortConvSpec(kernel_size=3, bias=bias),
        "full_attention": attention_of(config, None, qk_norm=True),
    }
    layers = [LayerSpec(mixer=mixers[kind], feed_forward=feed_forward) for kind in types]
    names = MIXER | {"self_attn.out_proj.weight": "mixer.o_proj.weight"}
    names |= {f"self_attn.{x}_layernorm.weight": f"mixer.{x}_norm.weight" for x in "qk"}
    names |= {"operator_norm.weight": "input_norm.weight", "ffn_norm.weight": "feed_forward_norm.weight"}
    names |= {f"feed_forward.{a}.weight": f"feed_forward.{b}_proj.weight" for a, b in
              (("w1", "gate"), ("w3", "up"), ("w2", "down"))}  # fmt: skip
    names |= {f"conv.{part}.{kind}": f"mixer.{part}.{kind}" for part in ("in_proj", "conv", "out_proj")
              for kind in ("weight", "bias")}  # fmt: skip
    state = renamed(model, names, {"embedding_norm.weight": "norm.weight"})
    assert_logits_of(model, spec_of(config, layers), state)


@pytest.mark.parametrize("caps", [(3.0, 5.0), (50.0, 30.0)])
def test_gemma2(caps: tuple[float, float]) -> None:
    """Softcaps on scores and on logits, every other layer sliding, four norms a layer, scaled embedding."""
    attention_cap, final_cap = caps
    model = tiny(
        "gemma2", num_hidden_layers=4, layer_types=ALTERNATING, sliding_window=8, query_pre_attn_scalar=32,
        attn_logit_softcapping=attention_cap, final_logit_softcapping=final_cap,
    )  # fmt: skip
    config = model.config
    feed_forward = MLPSpec(intermediate_size=96, activation="gelu_tanh")
    layers = [
        LayerSpec(
            mixer=attention_of(config, window_of(config, i), scale=32**-0.5, logit_softcap=attention_cap),
            feed_forward=feed_forward,
            post_norms=True,
        )
        for i in range(4)
    ]
    names = MIXER | {
        "input_layernorm.weight": "input_norm.weight",
        "post_attention_layernorm.weight": "post_mixer_norm.weight",
        "pre_feedforward_layernorm.weight": "feed_forward_norm.weight",
        "post_feedforward_layernorm.weight": "post_feed_forward_norm.weight",
    }
    names |= {f"mlp.{x}_proj.weight": f"feed_forward.{x}_proj.weight" for x in ("gate", "up", "down")}
    state = {name: tensor + 1 if "norm" in name else tensor for name, tensor in renamed(model, names).items()}
    assert_logits_of(model, spec_of(config, layers, embedding_scale=8.0, final_logit_softcap=final_cap), state)


@pytest.mark.parametrize("window", [1, 2])
def test_the_references_greedy_tokens_are_those_of_a_forward_without_a_cache(tmp_path: Path, window: int) -> None:
    """Transformers' own cache keeps every key of a window of 1."""
    model = tiny("mistral", num_hidden_layers=2, sliding_window=window)
    model.save_pretrained(tmp_path)
    reference = TransformersReference(open_checkpoint(CheckpointConfig(path=tmp_path)))
    tokens, rows = reference.greedy(range(5), 7)
    whole = model(torch.tensor([[*range(5), *tokens]])).logits[0, 4:]
    assert tokens == whole.argmax(-1)[:-1].tolist()
    assert (torch.stack(rows) - whole[1:]).abs().max() < RELATIVE * whole.abs().max()
