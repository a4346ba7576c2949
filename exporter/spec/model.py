"""What a model computes, layer by layer; a layer's kind is decided once, by its family, in `LayerSpec.mixer`."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from exporter.data import Spec
from exporter.kinds import MIXERS, MixerSpec

Activation = Literal["silu", "gelu_tanh", "gelu"]
if TYPE_CHECKING:
    Mixer = MixerSpec
else:  # whichever there are
    Mixer = Annotated[reduce(or_, MIXERS), Field(discriminator="type")]


class MLPSpec(Spec):
    """``down(act(gate(x)) * up(x))``."""

    type: Literal["mlp"] = "mlp"
    intermediate_size: int
    activation: Activation
    bias: bool = False

    def in_words(self) -> str:
        return str(self.intermediate_size)


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

    def in_words(self) -> str:
        return f"{self.num_experts_per_tok} of {self.num_experts} experts x {self.intermediate_size}"


class LayerSpec(Spec):
    """One decoder layer. `post_norms`: Gemma's second pair of norms, after attention and after the MLP."""

    mixer: Mixer
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
