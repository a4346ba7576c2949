"""Keys and values: the spec of attention, and what the kinds of its states have in common.

Letters: K KV heads, D head_dim, W window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import model_validator

from exporter.data import DTYPE_BYTES, Spec
from exporter.kinds.base import CacheKind, MixerSpec, Rows, StateForm, StateSpec, kind_of
from exporter.kinds.policy import CacheSettings


class KeyValueKind(CacheKind):
    """Keys and values ``[L, rows, K, D]``; where these are int8, each followed by its scales ``[L, rows, K, 1]``
    float32: a row stands for integer times scale. Row shape of a form: ``[K, D]``."""

    roles = ("keys", "key_scales", "values", "value_scales")
    scales = {"keys": "key_scales", "values": "value_scales"}  # noqa: RUF012  a constant of the class
    row_axes = 2
    dtypes = ("float32", "float16", "int8")
    positional = True
    rewinds = True

    def dtype(self, policy: CacheSettings) -> str:
        return policy.dtype

    def states(self, layer: int, form: StateForm, rows: Rows, dtype: str) -> tuple[StateSpec, ...]:
        states = []
        for role, scales in self.scales.items():
            states.append(self.state(layer, role, rows, form.row_shape, dtype))
            if dtype == "int8":
                states.append(self.state(layer, scales, rows, (*form.row_shape[:-1], 1), "float32"))
        return tuple(states)

    def row_bytes(self, row_shape: tuple[int, ...], dtype: str, sizes: Mapping[str, int] = DTYPE_BYTES) -> int:
        scales = math.prod(row_shape[:-1]) * sizes["float32"] if dtype == "int8" else 0
        return 2 * (math.prod(row_shape) * sizes[dtype] + scales)

    def full_rows(self, rows: int | None, context: int) -> int:
        return context

    def form_of(self, layer: Mapping[str, Any]) -> StateForm | None:
        if layer["kind"] != self.label:
            return None
        return StateForm(
            kind=self.name, row_shape=(layer["num_key_value_heads"], layer["head_dim"]), rows=layer["window"]
        )


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

    def in_words(self) -> str:
        scaling = "" if self.scaling == "none" else f", {self.scaling} x{self.factor:g}"
        return f"{self.theta:g}{scaling}"


class AttentionSpec(MixerSpec):
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
        if self.num_key_value_heads < 1 or self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"window {self.window} is below 1")
        return self

    @property
    def cache_kind(self) -> CacheKind:
        return kind_of("full" if self.window is None else "ring")

    def forms(self, hidden_size: int) -> tuple[StateForm, ...]:
        row_shape = (self.num_key_value_heads, self.head_dim)
        return (StateForm(kind=self.cache_kind.name, row_shape=row_shape, rows=self.window),)

    def facts(self) -> dict[str, str]:
        return {
            "window": "all" if self.window is None else str(self.window),
            "heads": str(self.num_attention_heads),
            "KV heads": str(self.num_key_value_heads),
            "head_dim": str(self.head_dim),
            "RoPE base": "none" if self.rope is None else self.rope.in_words(),
        }
