"""What a model family is: how its checkpoints spell a `ModelSpec` and the parameters of the decoder."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from exporter.spec import ModelSpec

# Reads one tensor of a GGUF file as float32.
ReadTensor = Callable[[str], torch.Tensor]

_BLOCK = re.compile(r"(?:layers|blk)\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Target:
    """Where a checkpoint tensor goes. `transform` maps the float32 tensor to one of the same shape."""

    name: str
    transform: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True)
class NameMap:
    """Checkpoint name -> canonical name, for tensors of a layer (without its prefix) and for the others."""

    layer: Mapping[str, str]
    top: Mapping[str, str]
    ignored: tuple[str, ...] = field(default=())

    def name(self, key: str) -> str | None:
        """The canonical name (docs/parameters.md), or None for a tensor the family does not know."""
        if match := _BLOCK.fullmatch(key):
            inner = self.layer.get(match[2])
            return None if inner is None else f"layers.{match[1]}.{inner}"
        return self.top.get(key)

    def is_ignored(self, key: str) -> bool:
        """True for the few tensors that are known to carry nothing the decoder needs."""
        return any(re.fullmatch(pattern, key) for pattern in self.ignored)


class Family(ABC):
    """One family of models. `model_types` are Hugging Face's, `architectures` GGUF's names for it."""

    model_types: tuple[str, ...]
    architectures: tuple[str, ...]

    @abstractmethod
    def spec_from_hf(self, config: Mapping[str, Any]) -> ModelSpec:
        """The spec that a ``config.json`` means.

        Raises:
            UnsupportedModelError: the config asks for arithmetic the spec cannot say.
            CheckpointError: the config contradicts itself.
        """

    @abstractmethod
    def target_from_hf(self, key: str, spec: ModelSpec) -> Target | None:
        """Where the tensor `key` of a Hugging Face checkpoint goes; None when the family does not know it."""

    @abstractmethod
    def is_ignored_hf(self, key: str) -> bool:
        """True for tensors of a Hugging Face checkpoint that are left out knowingly."""

    @abstractmethod
    def spec_from_gguf(
        self, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], read: ReadTensor
    ) -> ModelSpec:
        """The spec that a GGUF header means. Raises as `spec_from_hf` does."""

    @abstractmethod
    def target_from_gguf(self, key: str, spec: ModelSpec) -> Target | None:
        """Where the GGUF tensor `key` goes; None when the family does not know it."""

    @abstractmethod
    def is_ignored_gguf(self, key: str) -> bool:
        """True for GGUF tensors that are left out knowingly."""


ATTENTION_HF = {
    f"self_attn.{proj}_proj.{kind}": f"mixer.{proj}_proj.{kind}" for proj in "qkvo" for kind in ("weight", "bias")
}
QK_NORM_HF = {f"self_attn.{x}_norm.weight": f"mixer.{x}_norm.weight" for x in "qk"}
MLP_HF = {
    f"mlp.{proj}_proj.{kind}": f"feed_forward.{proj}_proj.{kind}"
    for proj in ("gate", "up", "down")
    for kind in ("weight", "bias")
}
TOP_HF = {
    "embed_tokens.weight": "embed_tokens.weight",
    "norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
}
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
TOP_GGUF = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}
