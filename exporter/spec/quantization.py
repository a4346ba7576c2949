"""How a program stores its weights: the rules that the sections of the config have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from exporter.data import Spec
from exporter.spec.recipe import Recipe


class QuantizationSpec(Spec):
    """Weights per kind of tensor; activations of quantised linears are int8, quantised per token at run time.

    `linear`, `embedding` and `head` are `none` or a grid of ``exporter.grids`` that the format carries: `int8` is
    symmetric per output channel or row, `int4` symmetric per group of `group_size` input channels. Linears whose name
    contains one of `keep_int8` stay int8 when `linear` is another grid.

    `smooth` is SmoothQuant-style scaling: factors folded into norms and weights spread the outliers of a linear's
    inputs over inputs and weights. `rounding` is that of linears and head. The first `head_int8_rows` rows of an int4
    head, those of the frequent tokens, are int8. A tied table is stored once: the embedding reads the head's rows. An
    int8 embedding beside an int4 head stores the remainder of the four bits as four more.
    """

    linear: str = "none"
    embedding: str = "none"
    head: str = "none"
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
"""Presets: what a config may name instead of a mapping, and what each promises (measured in docs/quantization.md):
`accurate` within 0.01 nats of the float model's negative log-likelihood, `balanced` within 0.02, `small` within 0.1.
A model need not have the matrices they name."""


class FormatOptions(Spec):
    """The section of a format in the config, recorded in the manifest with the program."""

    def recipe(self, shapes: Mapping[str, tuple[int, ...]], tied: bool) -> Recipe:
        """How a program stores every parameter of a model.

        Args:
            shapes: of its parameters; a tied head is none of its own.
            tied: whether the head is the embedding.

        Raises:
            ConfigError: the format has no such form, it does not suit the model, or the section names what the model
                has not.
        """
        raise NotImplementedError

    def described(self, recipe: Recipe) -> str:
        """How weights are stored, in words, for manifests and tables."""
        raise NotImplementedError


SENSITIVE = ("embed_tokens", "lm_head", "v_proj", "down_proj")
"""The matrices that stay int8 by default where weights have fewer bits: most of the loss comes from these."""
_EIGHT_BITS_OR_MORE = ("float32", "float16", "int8")


class ReducedWeights(FormatOptions):
    """`weights` is a grid of ``exporter.grids`` that the format carries. `keep_int8` has the meaning of
    `QuantizationSpec.keep_int8`, and embedding and head have names too: the matrices whose name contains one of its
    parts are int8 where `weights` has fewer bits. Left out, it is `SENSITIVE` there."""

    weights: str
    keep_int8: tuple[str, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _its_own_default(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or "keep_int8" in data:
            return data
        default = cls.model_fields["weights"].default
        return {**data, "keep_int8": keep_int8_by_default(str(data.get("weights", default)))}

    @model_validator(mode="after")
    def _only_beside_fewer_bits(self) -> Self:
        if self.keep_int8 and not keep_int8_by_default(self.weights):
            raise ValueError(f"keep_int8 beside weights of fewer bits than int8, not {self.weights}")
        return self

    def described(self, recipe: Recipe) -> str:
        return f"{self.weights}, int8 in {' '.join(self.keep_int8)}" if self.keep_int8 else self.weights


def keep_int8_by_default(weights: str) -> tuple[str, ...]:
    """What `ReducedWeights.keep_int8` is where it is left out."""
    return () if weights in _EIGHT_BITS_OR_MORE else SENSITIVE
