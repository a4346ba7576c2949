"""What `plan` reads: the config of an export, or an architecture written in YAML, for which no checkpoint is needed.

An architecture says which layers there are and what each keeps of a token (examples: configs/architectures/).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, field_validator, model_validator

from exporter.config import load_config, read_yaml_model, resolve
from exporter.lengths import CONTEXTS
from exporter.plan import LayerState, model_states
from exporter.quiet import native_stderr_hidden
from exporter.spec import DTYPE_BYTES, KINDS, CacheKind, Spec, dtypes_in_words, kind_labelled, one_of

_SEE = "configs/architectures/"
# Far beyond any model: a larger number is a typing error, and sums stay exact in a float.
_LARGEST = 2**40
Size = Annotated[StrictInt, Field(ge=1, le=_LARGEST)]
Count = Annotated[StrictInt, Field(ge=1, le=10_000)]

# bfloat16 counts bytes here; no program has such a cache yet.
CACHE_BYTES = DTYPE_BYTES | {"bfloat16": 2}
ArchitectureDType = Literal["float32", "float16", "bfloat16", "int8"]


class ShortConvState(Spec):
    """The last ``kernel_size - 1`` inputs of short causal convolutions over `channels` channels in all."""

    kernel_size: Annotated[StrictInt, Field(ge=2, le=_LARGEST)]
    channels: Size


class LayerRun(Spec):
    """`count` equal layers in a row.

    A sliding layer has `window`, `num_key_value_heads` and `head_dim`, a global one the last two, and both may keep a
    `short_conv` beside their cache; a conv layer has that alone.
    """

    kind: str
    count: Count = 1
    window: Size | None = None
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    short_conv: ShortConvState | None = None

    @field_validator("kind")
    @classmethod
    def _kind_exists(cls, value: str) -> str:
        return one_of(value, [kind.label for kind in KINDS.values() if kind.layer_keys is not None])

    @model_validator(mode="after")
    def _keys_of_the_kind(self) -> LayerRun:
        needed = kind_labelled(self.kind).layer_keys
        assert needed is not None
        others = type(self).model_fields.keys() - {"kind", "count"}
        given = {key for key in others if getattr(self, key) is not None}
        if missing := sorted(needed - given):
            raise ValueError(f"a {self.kind} layer needs {', '.join(missing)}")
        if foreign := sorted(given - needed - {"short_conv"}):
            raise ValueError(f"a {self.kind} layer has no {', '.join(foreign)}")
        return self

    def states(self, layer: int, cache: ArchitectureCache) -> list[LayerState]:
        """The state of one of these layers."""
        states, said = [], self.model_dump()
        for kind in KINDS.values():
            if (form := kind.form_of(said)) is not None:
                row_bytes = kind.row_bytes(form.row_shape, cache.dtype_of(kind), CACHE_BYTES)
                states.append(LayerState(layer, kind.label, row_bytes, form.rows, kind.slack(cache)))
        return states


class ArchitectureCache(Spec):
    """How the state is kept. An int8 cache has a float32 scale for each row and KV head; what is no row of a token is
    float32 beside it."""

    dtype: ArchitectureDType = "float32"
    global_dtype: ArchitectureDType | None = None
    ring_slack: Annotated[StrictInt, Field(ge=0, le=_LARGEST)] = 0

    def dtype_of(self, kind: CacheKind) -> str:
        """Of the rows of one kind."""
        if kind.positional:
            return kind.dtype(self)
        return "float32" if self.dtype == "int8" else self.dtype


class Architecture(Spec):
    """A model as far as its state goes.

    `layers` are runs from the first layer on; with `num_layers` they are one period, repeated and cut off there. An
    absent `max_context_length` means that no limit is known.
    """

    name: str
    max_context_length: Size | None = None
    cache: ArchitectureCache = ArchitectureCache()
    layers: tuple[LayerRun, ...]
    num_layers: Count | None = None

    @field_validator("layers")
    @classmethod
    def _some_layers(cls, value: tuple[LayerRun, ...]) -> tuple[LayerRun, ...]:
        if not value:
            raise ValueError("at least one run of layers")
        return value

    @model_validator(mode="after")
    def _at_least_one_period(self) -> Architecture:
        period = sum(run.count for run in self.layers)
        if self.num_layers is not None and self.num_layers < period:
            raise ValueError(f"num_layers of at least {period}, the number in layers, not {self.num_layers}")
        return self

    def states(self) -> tuple[LayerState, ...]:
        """The state of every layer, from the first on."""
        period = [run for run in self.layers for _ in range(run.count)]
        runs = itertools.islice(itertools.cycle(period), self.num_layers or len(period))
        return tuple(state for layer, run in enumerate(runs) for state in run.states(layer, self.cache))


@dataclass(frozen=True)
class Planned:
    """What to plan for. `max_context` is the most tokens that make sense, `usual_context` the most shown unasked."""

    name: str
    caches: str
    states: tuple[LayerState, ...]
    max_context: int
    usual_context: int

    @property
    def layers(self) -> int:
        return len({state.layer for state in self.states})

    @property
    def title(self) -> str:
        return f"{self.name}: {self.layers} layers, {self.caches} caches"


class _EitherFile(BaseModel):
    """Tells the two kinds of file apart by a key that only one of them has."""

    model_config = ConfigDict(extra="allow")
    checkpoint: Any = None
    layers: Any = None

    @model_validator(mode="after")
    def _one_of_them(self) -> _EitherFile:
        if ("checkpoint" in self.model_fields_set) == ("layers" in self.model_fields_set):
            raise ValueError("either checkpoint (the config of an export) or layers (an architecture)")
        return self


def read_planned(path: Path, overrides: Mapping[str, Any] | None = None) -> Planned:
    """Read either kind of YAML. Of a checkpoint only the description is read, no tensor.

    Args:
        path: the file.
        overrides: dotted keys whose values replace the file's.

    Raises:
        ConfigError: the file is missing, empty or no YAML, a key is unknown, a value is missing or out of range.
        CheckpointError: the config's checkpoint is missing, damaged or refused.
        UnsupportedModelError: a checkpoint no family can describe.
    """
    if "layers" in read_yaml_model(path, _EitherFile, "configs/").model_fields_set:
        architecture = read_yaml_model(path, Architecture, _SEE, overrides)
        limit = architecture.max_context_length
        return Planned(
            name=architecture.name,
            caches=dtypes_in_words(architecture.cache.dtype, architecture.cache.global_dtype),
            states=architecture.states(),
            max_context=_LARGEST if limit is None else limit,
            usual_context=CONTEXTS[-1] if limit is None else limit,
        )
    config = load_config(path, overrides)
    with native_stderr_hidden():  # brings torch with it, which an architecture can do without
        from exporter.checkpoint import open_checkpoint
    spec = open_checkpoint(config.checkpoint).spec
    config = resolve(config, spec)
    assert config.max_context_length is not None
    return Planned(
        name=config.name,
        caches=config.cache.caches,
        states=model_states(spec, config.cache),
        max_context=spec.max_position_embeddings,
        usual_context=config.max_context_length,
    )
