"""How a program keeps its weights, and what every format's section of the config can say of that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from exporter.spec.base import Spec


class QuantizationSpec(Spec):
    """Weights per kind of tensor; activations of quantised linears are int8, quantised per token at run time.

    `int8` is symmetric per output channel; `int4` symmetric per group of `group_size` input channels. Linears whose
    name contains one of `keep_int8` stay int8 when `linear` is int4. An embedding is int8 per row or int4 per group.

    `smooth` folds factors into norms and weights so that inputs of linears and weights share their outliers, `rounding`
    says how linears and head are rounded, and the first `head_int8_rows` rows of an int4 head, those of the frequent
    tokens, are int8. A tied table is stored once: the embedding takes its rows from the head's, and an int8 one beside
    an int4 head adds what the four bits leave over as four more.
    """

    linear: Literal["none", "int8", "int4"] = "none"
    embedding: Literal["none", "int8", "int4"] = "none"
    head: Literal["none", "int8", "int4"] = "none"
    group_size: int = Field(default=32, ge=32, multiple_of=32)
    keep_int8: tuple[str, ...] = ()
    smooth: bool = False
    rounding: Literal["nearest", "gptq"] = "nearest"
    head_int8_rows: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _has_what_it_refines(self) -> QuantizationSpec:
        if self.smooth and self.linear == self.head == "none":
            raise ValueError("a quantised linear or head for smooth: it acts on the inputs of those")
        if self.rounding == "gptq" and self.linear == self.head == "none":
            raise ValueError("a quantised linear or head for rounding gptq: it follows the inputs of those")
        if self.head_int8_rows and self.head != "int4":
            raise ValueError("head int4 for head_int8_rows")
        return self

    @property
    def is_calibrated(self) -> bool:
        """Whether it depends on what the model's inputs look like."""
        return self.smooth or self.rounding == "gptq"

    @property
    def is_quantized(self) -> bool:
        return {self.linear, self.embedding, self.head} != {"none"}


PRESETS: dict[str, QuantizationSpec] = {
    "none": QuantizationSpec(),
    "accurate": QuantizationSpec(linear="int8", embedding="int8", head="int8", smooth=True, rounding="gptq"),
    "balanced": QuantizationSpec(
        linear="int8", embedding="int8", head="int4", smooth=True, rounding="gptq", head_int8_rows=8192
    ),
    "small": QuantizationSpec(
        linear="int4",
        embedding="int8",
        head="int4",
        keep_int8=("down_proj", "k_proj", "v_proj"),
        smooth=True,
        rounding="gptq",
    ),
}
"""What a config may name instead of a mapping, by what it promises (docs/quantization.md has what was measured):
`accurate` within 0.01 nats of the float model's negative log-likelihood, `balanced` within 0.02, `small` within 0.1.
A model need not have the matrices they name."""


class FormatOptions(Spec):
    """The section of a format in the config; the manifest records it with the program."""

    @property
    def rounds(self) -> bool:
        """Whether the program is no longer the float32 model: weights, activations or arithmetic are rounded."""
        raise NotImplementedError

    @property
    def decoder(self) -> QuantizationSpec:
        """What is done to the decoder before it is traced, where the format's traits say `decoder_is_rounded`."""
        return QuantizationSpec()


_SENSITIVE = ("embed_tokens", "lm_head", "v_proj", "down_proj")
KEEP_INT8: dict[str, tuple[str, ...]] = {"int4": _SENSITIVE, "palettized4": _SENSITIVE}
"""The matrices that keep 8 bits by default in the options that have 4: most of what those cost sits in these."""


class ReducedWeights(FormatOptions):
    """`keep_int8` has the meaning of `QuantizationSpec.keep_int8`, and embedding and head have names too: the matrices
    whose name contains one of its parts are int8 where `weights` has 4 bits. Left out, it is that of `KEEP_INT8`."""

    weights: str
    keep_int8: tuple[str, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _its_own_default(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or "keep_int8" in data:
            return data
        return {**data, "keep_int8": KEEP_INT8.get(str(data.get("weights")), ())}

    @model_validator(mode="after")
    def _only_beside_four_bits(self) -> Self:
        if self.keep_int8 and self.weights not in KEEP_INT8:
            raise ValueError(f"keep_int8 beside weights {' or '.join(KEEP_INT8)}, not {self.weights}")
        return self

    @property
    def rounds(self) -> bool:
        return self.weights != "float32"

    @property
    def described(self) -> str:
        """In words, for manifests and tables."""
        return f"{self.weights}, int8 in {' '.join(self.keep_int8)}" if self.keep_int8 else self.weights
