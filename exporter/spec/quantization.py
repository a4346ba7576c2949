"""How a program stores its weights: the rules that the sections of the config have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from exporter.data import DType, Spec
from exporter.spec.quality import QualityPromise
from exporter.spec.recipe import Recipe


class QuantizationSpec(Spec):
    """Weights per kind of tensor; activations of quantised linears are int8, quantised per token at run time.

    `linear`, `embedding` and `head` are `none` or a grid of ``exporter.grids`` that the format carries: `int8` is
    symmetric per output channel or row, `int4` symmetric per group of `group_size` input channels. Linears whose name
    contains one of `keep_int8` stay int8 when `linear` is another grid.

    `smooth` is SmoothQuant-style scaling: factors folded into norms and weights spread the outliers of a linear's
    inputs over inputs and weights. `rounding` is that of linears and head. With `head_exact_rows`, an int4 head finds
    the best so many tokens, whose logits are then computed from rows of 8 bits, `int8_grouped`, and float activations:
    the embedding's where that has them, others where it has not. A tied table is stored once where the head is as fine
    as the embedding is asked to be.

    `max_kl_divergence`, in nats, is the ceiling that verification holds the program to; left out, `promise_of` has it.
    """

    linear: str = "none"
    embedding: str = "none"
    head: str = "none"
    group_size: int = Field(default=32, ge=32, multiple_of=32)
    keep_int8: tuple[str, ...] = ()
    smooth: bool = False
    rounding: Literal["nearest", "gptq"] = "nearest"
    head_exact_rows: int = Field(default=0, ge=0)
    max_kl_divergence: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _has_what_it_refines(self) -> QuantizationSpec:
        if self.smooth and self.linear == self.head == "none":
            raise ValueError("a quantised linear or head for smooth: it acts on the inputs of those")
        if self.rounding == "gptq" and self.linear == self.head == "none":
            raise ValueError("a quantised linear or head for rounding gptq: it follows the inputs of those")
        if self.head_exact_rows and self.head == "none":
            raise ValueError("a quantised head for head_exact_rows")
        return self


PRESETS: dict[str, QuantizationSpec] = {
    "none": QuantizationSpec(),
    "accurate": QuantizationSpec(
        linear="int8", embedding="int8_grouped", head="int4", smooth=True, rounding="gptq", head_exact_rows=4096
    ),
    "balanced": QuantizationSpec(
        linear="int8", embedding="int8_grouped", head="int4", smooth=True, rounding="gptq", head_exact_rows=1024
    ),
    "small": QuantizationSpec(
        linear="int4",
        embedding="int8_grouped",
        head="int4",
        keep_int8=("down_proj", "k_proj", "v_proj"),
        smooth=True,
        rounding="gptq",
        head_exact_rows=1024,
    ),
}
"""Presets: what a config may name instead of a mapping. A model need not have the matrices they name."""

QUALITY_PROMISES: dict[str, QualityPromise] = {
    "accurate": QualityPromise(nll=0.01, kl=0.009),
    "balanced": QualityPromise(nll=0.02, kl=0.02),
    "small": QualityPromise(nll=0.10, kl=0.10),
}
"""What each promises on the worst domain of `exporter.quality`; every export holds the file to it. Measured in
docs/quality.md."""


class Promise(Spec):
    """`max_kl`, in nats: a program whose mean KL divergence from the float model is above it is refused. It is the
    ceiling for files that are broken, on a few positions of one text, and wider than what was measured on many."""

    max_kl: float


PROMISES: dict[str, Promise] = {
    "none": Promise(max_kl=0.0),
    "accurate": Promise(max_kl=0.05),
    "balanced": Promise(max_kl=0.08),
    "small": Promise(max_kl=0.25),
}
"""Of the presets, over float32 caches."""
CACHE_PROMISES: dict[DType, Promise] = {
    "float32": Promise(max_kl=0.0), "float16": Promise(max_kl=0.001), "int8": Promise(max_kl=0.05),
}  # fmt: skip
"""What the coarsest cache comes to beside the weights."""


def promise_of(spec: QuantizationSpec) -> Promise:
    """The ceiling of `spec`: what it states itself, or that of the nearest preset. That is the strictest of those that
    are in no respect finer than `spec`; where each is finer in something, the least strict of all."""
    if spec.max_kl_divergence is not None:
        return Promise(max_kl=spec.max_kl_divergence)
    return PROMISES[nearest_preset(spec)]


def nearest_preset(spec: QuantizationSpec) -> str:
    """The preset whose promises are those of `spec` too, by its name; see `promise_of`."""
    names = [name for name, preset in PRESETS.items() if not _finer(preset, spec)]
    if not names:
        return max(PROMISES, key=lambda name: PROMISES[name].max_kl)
    return min(names, key=lambda name: PROMISES[name].max_kl)


def _finer(one: QuantizationSpec, other: QuantizationSpec) -> bool:
    """Whether `one` keeps more of a float model than `other` in some respect."""
    grids = [(getattr(one, part), getattr(other, part)) for part in ("linear", "embedding", "head")]
    return (
        any(_coarseness(ours) < _coarseness(theirs) for ours, theirs in grids)
        or (one.smooth and not other.smooth)
        or (one.rounding == "gptq" and other.rounding != "gptq")
        or (_coarseness(other.linear) > 1 and not set(one.keep_int8) <= set(other.keep_int8))
        or (other.head != "none" and one.head_exact_rows > other.head_exact_rows)
        or ("int4" in {theirs for _, theirs in grids} and one.group_size < other.group_size)
    )


def _coarseness(grid: str) -> int:
    """From floats on; a grid that no preset has is the coarsest."""
    known = ("none", "int8_grouped", "int8", "int4")
    return known.index(grid) if grid in known else len(known)


REDUCED_PROMISES: dict[str, Promise] = {
    "float32": Promise(max_kl=0.0), "float16": Promise(max_kl=0.001), "int8": Promise(max_kl=0.1),
    "int4": Promise(max_kl=0.5), "palettized4": Promise(max_kl=0.8),
}  # fmt: skip
"""Of the same kind as `PROMISES`, by what the other formats call their weights."""
LEAST_STRICT = max((*PROMISES.values(), *REDUCED_PROMISES.values()), key=lambda promise: promise.max_kl)
"""Of a grid that has no promise of its own."""


class FormatOptions(Spec):
    """The section of a format in the config, recorded in the manifest with the program."""

    @property
    def promise(self) -> Promise:
        """The ceiling of the weights as they are stored, over float32 caches, where the config states none."""
        raise NotImplementedError

    @property
    def stated_max_kl(self) -> float | None:
        """The ceiling that the config states for weights and caches together."""
        raise NotImplementedError

    @property
    def preset(self) -> str | None:
        """The preset whose quality is promised, the nearest one of a mapping; None where nothing is."""
        return None

    def with_preset(self, name: str) -> Self:
        """The same section with the weights of a preset; of one that has a `preset`."""
        raise NotImplementedError

    def ceiling(self, cache_dtypes: Iterable[DType]) -> float:
        """The most mean KL divergence from the float model, in nats, that a program over caches of these dtypes may
        have: the stated one, or the promise of the weights and that of the coarsest cache."""
        if self.stated_max_kl is not None:
            return self.stated_max_kl
        return self.promise.max_kl + max(CACHE_PROMISES[dtype].max_kl for dtype in cache_dtypes)

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
    parts are int8 where `weights` has fewer bits. Left out, it is `SENSITIVE` there. `max_kl_divergence` is as there;
    left out, it is that of `REDUCED_PROMISES`."""

    weights: str
    keep_int8: tuple[str, ...] = ()
    max_kl_divergence: float | None = Field(default=None, gt=0)

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

    @property
    def promise(self) -> Promise:
        return REDUCED_PROMISES.get(self.weights, LEAST_STRICT)

    @property
    def stated_max_kl(self) -> float | None:
        return self.max_kl_divergence

    def described(self, recipe: Recipe) -> str:
        return f"{self.weights}, int8 in {' '.join(self.keep_int8)}" if self.keep_int8 else self.weights


def keep_int8_by_default(weights: str) -> tuple[str, ...]:
    """What `ReducedWeights.keep_int8` is where it is left out."""
    return () if weights in _EIGHT_BITS_OR_MORE else SENSITIVE
