"""What a model family is: how its checkpoints spell a `ModelSpec` and the parameters of the decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from exporter.families.tensors import TensorTable
from exporter.spec import ModelSpec

# Reads one tensor of a GGUF file as float32.
ReadTensor = Callable[[str], torch.Tensor]
Shapes = Mapping[str, tuple[int, ...]]


class Described(NamedTuple):
    """A model as its checkpoint describes it: what its tensors bring, and what it computes."""

    tensors: TensorTable
    spec: ModelSpec


@dataclass(frozen=True)
class Family:
    """One family of models; a module of this package that has one as `FAMILY` is all there is to adding it.

    Both functions raise `UnsupportedModelError` for arithmetic the spec cannot say, and `CheckpointError` or pydantic's
    `ValidationError` for a description that contradicts itself.

    Attributes:
        model_types: Hugging Face's names for it.
        from_hf: reads a ``config.json``.
        architectures: GGUF's names for it.
        from_gguf: reads a GGUF header: its metadata, the shapes of its tensors in torch's order, and a tensor if need
            be.
        quant_methods: those of a ``quantization_config`` whose tensors the family's table reads.
    """

    model_types: tuple[str, ...]
    from_hf: Callable[[Mapping[str, Any]], Described]
    architectures: tuple[str, ...] = ()
    from_gguf: Callable[[Mapping[str, Any], Shapes, ReadTensor], Described] | None = None
    quant_methods: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert bool(self.architectures) == (self.from_gguf is not None)


ATTENTION_HF = {
    f"self_attn.{proj}_proj.{kind}": f"mixer.{proj}_proj.{kind}" for proj in "qkvo" for kind in ("weight", "bias")
}
QK_NORM_HF = {f"self_attn.{x}_norm.weight": f"mixer.{x}_norm.weight" for x in "qk"}
MLP_HF = {
    f"mlp.{proj}_proj.{kind}": f"feed_forward.{proj}_proj.{kind}"
    for proj in ("gate", "up", "down")
    for kind in ("weight", "bias")
}
NORMS_HF = {
    "input_layernorm.weight": "input_norm.weight",
    "post_attention_layernorm.weight": "feed_forward_norm.weight",
}
POST_NORMS_HF = {
    "input_layernorm.weight": "input_norm.weight",
    "post_attention_layernorm.weight": "post_mixer_norm.weight",
    "pre_feedforward_layernorm.weight": "feed_forward_norm.weight",
    "post_feedforward_layernorm.weight": "post_feed_forward_norm.weight",
}
FINAL_NORM_HF = {"norm.weight": "norm.weight"}
TABLES_HF = {"embed_tokens.weight": "embed_tokens.weight", "lm_head.weight": "lm_head.weight"}
# `inv_freq` is a buffer that old checkpoints saved; the spec says the same.
IGNORED_HF = (r"(?:.*\.)?rotary_emb\.inv_freq",)

ATTENTION_GGUF = {
    f"attn_{gguf}.{kind}": f"mixer.{proj}_proj.{kind}"
    for gguf, proj in (("q", "q"), ("k", "k"), ("v", "v"), ("output", "o"))
    for kind in ("weight", "bias")
}
QK_NORM_GGUF = {f"attn_{x}_norm.weight": f"mixer.{x}_norm.weight" for x in "qk"}
MLP_GGUF = {
    f"ffn_{proj}.{kind}": f"feed_forward.{proj}_proj.{kind}"
    for proj in ("gate", "up", "down")
    for kind in ("weight", "bias")
}
NORMS_GGUF = {"attn_norm.weight": "input_norm.weight", "ffn_norm.weight": "feed_forward_norm.weight"}
POST_NORMS_GGUF = NORMS_GGUF | {
    "post_attention_norm.weight": "post_mixer_norm.weight",
    "post_ffw_norm.weight": "post_feed_forward_norm.weight",
}
TOP_GGUF = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}
