"""What a model computes, layer by layer; a layer's kind is decided once, by its family, in `LayerSpec.mixer`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from exporter.spec.base import Spec

Activation = Literal["silu", "gelu_tanh", "gelu"]


class RopeSpec(Spec):
    """Rotary position embedding of one layer, in the half-split ("neox") layout of Transformers.

    The first `rotary_dim` of `head_dim` channels rotate with inverse frequencies ``theta ** (-2i / rotary_dim)``,
    rescaled as `scaling` says (formulas: ``transformers.modeling_rope_utils``). `attention_factor` multiplies cos and
    sin (YaRN); None means the formula's own value.
    """

    theta: float
    rotary_dim: int
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool = True
    attention_factor: float | None = None


class AttentionSpec(Spec):
    """One attention layer. ``window is None`` means global attention; otherwise W keys, the current one included."""

    type: Literal["attention"] = "attention"
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    window: int | None
    scale: float
    rope: RopeSpec | None
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    sinks: bool = False
    logit_softcap: float | None = None

    @model_validator(mode="after")
    def _heads_divide(self) -> AttentionSpec:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"window {self.window} is below 1")
        return self

    @property
    def kind(self) -> Literal["sliding", "global"]:
        return "global" if self.window is None else "sliding"


class ShortConvSpec(Spec):
    """A gated short causal convolution (LFM2): its state is its last ``kernel_size - 1`` inputs, no KV cache."""

    type: Literal["short_conv"] = "short_conv"
    kernel_size: int = Field(ge=2)
    bias: bool = False

    @property
    def kind(self) -> Literal["conv"]:
        return "conv"


class MLPSpec(Spec):
    """``down(act(gate(x)) * up(x))``."""

    type: Literal["mlp"] = "mlp"
    intermediate_size: int
    activation: Activation
    bias: bool = False


class MoESpec(Spec):
    """Mixture of experts: each token goes through the `num_experts_per_tok` experts its router scores highest.

    `routing` says how the chosen scores become weights: ``softmax_topk`` softmaxes over all experts, then picks (and
    divides by the sum of the picked when `normalize_topk`); ``topk_softmax`` picks, then softmaxes over the picked.
    `clamp_limit` selects GPT-OSS's clamped SwiGLU: ``(up + 1) * gate * sigmoid(1.702 gate)`` with both clamped.
    """

    type: Literal["moe"] = "moe"
    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    activation: Activation
    routing: Literal["softmax_topk", "topk_softmax"]
    normalize_topk: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    clamp_limit: float | None = None


class LayerSpec(Spec):
    """One decoder layer. `post_norms`: Gemma's second pair of norms, after attention and after the MLP."""

    mixer: Annotated[AttentionSpec | ShortConvSpec, Field(discriminator="type")]
    feed_forward: Annotated[MLPSpec | MoESpec, Field(discriminator="type")]
    post_norms: bool = False


class ModelSpec(Spec):
    """Everything the decoder needs to know about a model.

    RMSNorm weights in a state dict are the factors themselves: a checkpoint reader adds Gemma's offset of 1 to what a
    Hugging Face file stores, and a GGUF file carries it folded in already. `embedding_scale` multiplies the embedding
    (Gemma: sqrt(hidden_size)).
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    embedding_scale: float = 1.0
    tie_word_embeddings: bool
    final_logit_softcap: float | None = None
    max_position_embeddings: int
