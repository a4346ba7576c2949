"""What a cache kind says of its states, and what is said of states in the words of all kinds.

A state is a tensor that the caller owns and the programs write in place. Its kind is how its rows relate to tokens:
everything that differs between kinds is a method or an attribute of `CacheKind`, and nobody else asks for a name.

Letters: L layers that share a tensor, Q tokens of a call, S tokens after it, n tokens in a conversation, M its
high-water mark: the most tokens it ever held.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import Field, field_validator, model_validator

from exporter.data import DTYPE_BYTES, DType, Spec
from exporter.kinds.policy import CachePolicy, CacheSettings

Layout = Literal["per_layer", "stacked", "static"]
"""How a program takes its states. ``per_layer``: each its own tensor. ``stacked``: those of equal kind and role in one,
the layers on axis 0. ``static``: per layer, and states that would grow at the whole context from the start."""


class StateForm(Spec):
    """What one layer keeps, before a policy and a context settle how much of it.

    `rows` is a number that the model itself gives (a window, the inputs of a convolution); None where every token has a
    row. `row_shape` is that of one row of the kind's first role.
    """

    kind: str
    row_shape: tuple[int, ...]
    rows: int | None = None


class Rows(NamedTuple):
    """How many rows a state has: at first, at most, and the window of attention over them where there is one."""

    rows: int
    max_rows: int
    window: int | None = None


class StateSpec(Spec):
    """One tensor the caller allocates and passes to every program, which writes it in place.

    shape: ``[L, rows, *row_shape]``; L is the number of `layers` that share the tensor, each with its own part of axis
    0, and what a row is its kind and role say. `rows` is the number to allocate first; a state of a kind that grows may
    have up to `max_rows`, unless it is `static`.

    Raises:
        ValueError: no such kind, or the kind has no such role.
    """

    name: str
    layers: tuple[int, ...] = Field(min_length=1)
    kind: str
    role: str
    rows: int
    max_rows: int
    window: int | None
    row_shape: tuple[int, ...]
    dtype: DType
    static: bool = False

    @field_validator("kind")
    @classmethod
    def _kind_exists(cls, value: str) -> str:
        return one_of(value, registered())

    @model_validator(mode="after")
    def _role_is_the_kinds(self) -> StateSpec:
        one_of(self.role, self.cache_kind.roles)
        return self

    @property
    def cache_kind(self) -> CacheKind:
        return kind_of(self.kind)

    @property
    def grows(self) -> bool:
        return self.cache_kind.grows and not self.static

    @property
    def scales(self) -> str | None:
        """The name of the state that scales this one's integers, if it holds integers (of one layer then)."""
        role = self.cache_kind.scales.get(self.role)
        return state_name(self.layers[0], role) if role is not None and self.dtype == "int8" else None

    @property
    def row_bytes(self) -> int:
        """One row of every layer of it."""
        return len(self.layers) * math.prod(self.row_shape) * DTYPE_BYTES[self.dtype]

    def shape(self, rows: int | None = None) -> tuple[int, ...]:
        return (len(self.layers), self.rows if rows is None else rows, *self.row_shape)

    def bytes(self, rows: int | None = None) -> int:
        return self.row_bytes * (self.rows if rows is None else rows)

    def rows_for(self, tokens: int) -> int:
        """The fewest rows with which a program may be called for `tokens` tokens in all."""
        return tokens if self.grows else self.rows


def state_name(layer: int, role: str) -> str:
    return f"layer_{layer}_{role}"


class CacheKind(ABC):
    """A kind of state. An instance has no data of its own.

    Attributes:
        name: what manifests and contracts call it.
        label: what people call its layers, in tables, plans and architectures.
        line: what a plot of the plan calls the line of all its layers.
        order: its place among the kinds, in all of these.
        roles: the states of one layer, in the order in which programs take them; `scales` names the one whose float32
            rows scale the integers of another.
        row_axes: how many axes a row of the first role has.
        dtypes: those that rows of the first role may have.
        grows: whether every token adds a row, so that states are allocated as the conversation grows. Their rows are
            then in order of position.
        positional: whether a row belongs to a position (`row_of`); otherwise every call replaces all rows.
        rewinds: whether dropping tokens may be possible; otherwise an earlier length comes back from a snapshot alone
            (`State.fork`, `State.save`).
        first_row: in words, the row of the first position of a call, S - Q; of a positional kind.
        listed: whether plans list it for models too that have no such layer.
        layer_keys: what a layer of this kind must say in the YAML of an architecture; None where none can be written.
    """

    name: ClassVar[str]
    label: ClassVar[str]
    line: ClassVar[str]
    order: ClassVar[int]
    roles: ClassVar[tuple[str, ...]]
    scales: ClassVar[Mapping[str, str]] = {}
    row_axes: ClassVar[int] = 1
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float16")
    grows: ClassVar[bool] = False
    positional: ClassVar[bool] = False
    rewinds: ClassVar[bool] = False
    first_row: ClassVar[str] = ""
    listed: ClassVar[bool] = False
    layer_keys: ClassVar[frozenset[str] | None] = None

    # What is allocated, from a form, a policy and a context.

    def rows(self, form: StateForm, policy: CachePolicy, context: int, layout: Layout) -> Rows:
        """How many rows a layer of that form gets in a bundle of `context` tokens. Here: those of the form."""
        assert form.rows is not None
        return Rows(form.rows, form.rows)

    def dtype(self, policy: CacheSettings) -> str:
        """What its rows are kept in where the format does not say."""
        return "float32"

    def slack(self, policy: CacheSettings) -> int:
        """Rows beside those of its form."""
        return 0

    def states(self, layer: int, form: StateForm, rows: Rows, dtype: str) -> tuple[StateSpec, ...]:
        """The states of one layer, in the order of `roles`."""
        return tuple(self.state(layer, role, rows, form.row_shape, dtype) for role in self.roles)

    def state(self, layer: int, role: str, rows: Rows, row_shape: tuple[int, ...], dtype: str) -> StateSpec:
        """One of them, ``[1, rows, *row_shape]``."""
        return StateSpec.model_validate(
            {"name": state_name(layer, role), "layers": (layer,), "kind": self.name, "role": role, **rows._asdict(),
             "row_shape": row_shape, "dtype": dtype}
        )  # fmt: skip

    # What it costs, in rows and bytes, at any context.

    def row_bytes(self, row_shape: tuple[int, ...], dtype: str, sizes: Mapping[str, int] = DTYPE_BYTES) -> int:
        """Bytes of one row of all states of a layer; `sizes` are those of dtypes."""
        return len(self.roles) * math.prod(row_shape) * sizes[dtype]

    def planned_rows(self, rows: int | None, slack: int, context: int) -> int:
        """Rows that a program made for `context` tokens allocates when that many are in it. `rows` as in `StateForm`;
        `slack` comes on top."""
        assert rows is not None
        return rows + slack

    def full_rows(self, rows: int | None, context: int) -> int:
        """Rows if nothing were ever dropped: here as many as there are, for lack of a longer form."""
        return self.planned_rows(rows, 0, context)

    def fills_at(self, rows: int | None) -> int | None:
        """The context from which on it grows no further; None if it always grows, or never."""
        return None

    # What a conversation does to it.

    def used_rows(self, spec: StateSpec, length: int, high_water: int) -> int:
        """Rows that hold something of the `length` tokens of a conversation."""
        return min(length, spec.rows)

    def kept_rows(self, spec: StateSpec, length: int) -> int:
        """The first rows, as many as it takes to go on from `length` tokens: what a copy and a file have of a state."""
        return spec.rows

    def saved_as(self, spec: StateSpec, length: int) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of what a file has of it after `length` tokens."""
        return spec.shape(self.kept_rows(spec, length)), spec.dtype

    def earliest(self, spec: StateSpec, length: int, high_water: int) -> int:
        """The shortest length above 0 that a conversation can be rewound to; 0 where any will do."""
        assert not self.rewinds, f"{self.name} must say how far back it goes"
        return length

    def lost(self, spec: StateSpec, high_water: int) -> tuple[str, str]:
        """Why it goes back no further than `earliest`, and what to do about it."""
        return f"the {self.label} layers keep no history", "Start over with reset()."

    # What a program has to do.

    @property
    def index_check(self) -> str:
        """The name of the graph check that holds writes to places that shapes decide; of a positional kind."""
        return f"{self.name}_write_index_from_shapes"

    @abstractmethod
    def writes_first(self, write_first: bool) -> bool:
        """Whether a program writes its rows before it reads them; `write_first` is what the program does with rings."""

    def order_check(self, write_first: bool) -> str:
        """The name of the graph check that holds a program to that order."""
        order = "writes_before_read" if self.writes_first(write_first) else "reads_before_write"
        return f"{self.name}_{order}"

    def wrong_order(self, write_first: bool) -> str:
        """What the other order means, and what it is usually a sign of."""
        return ""

    def row_of(self, position: Any, rows: int) -> Any:
        """The row that a write of `position` lands on in a state of `rows` rows; None: on none. `position` is an int,
        or an expression with the operators of one."""
        return None

    # What an architecture says of it.

    def form_of(self, layer: Mapping[str, Any]) -> StateForm | None:
        """What a layer of an architecture keeps in states of this kind, if anything.

        Args:
            layer: the keys of `architecture.LayerRun`, absent ones None.
        """
        return None


_KINDS: dict[str, CacheKind] = {}

K = TypeVar("K", bound=CacheKind)


def register(kind: type[K]) -> type[K]:
    """Add a kind, as a decorator of its class."""
    assert kind.name not in _KINDS and kind.label not in {other.label for other in _KINDS.values()}, kind.name
    _KINDS[kind.name] = kind()
    return kind


def registered() -> dict[str, CacheKind]:
    """All kinds by name, in their order."""
    return {kind.name: kind for kind in sorted(_KINDS.values(), key=lambda kind: kind.order)}


def kind_of(name: str) -> CacheKind:
    """The kind of that name, which exists."""
    return _KINDS[name]


def kind_labelled(label: str) -> CacheKind:
    """The kind whose layers people call that; there is one."""
    return next(kind for kind in _KINDS.values() if kind.label == label)


def one_of(value: str, names: Any) -> str:
    """`value`, which must be one of `names`.

    Raises:
        ValueError: it is none, in the words of a pydantic literal.
    """
    if value not in names:
        *first, last = (repr(name) for name in names)
        raise ValueError(f"Input should be {', '.join(first)}{' or ' if first else ''}{last}")
    return value


class MixerSpec(Spec):
    """What mixes the tokens of a layer: attention, a convolution. The one place where a layer's kind is decided.

    A subclass names itself in `type`, a literal. The module that computes it is the one in `exporter.model` that is
    registered for the subclass.
    """

    type: str

    @property
    @abstractmethod
    def cache_kind(self) -> CacheKind:
        """The kind that names the layer."""

    @property
    def kind(self) -> str:
        """What people call the layer."""
        return self.cache_kind.label

    @abstractmethod
    def forms(self, hidden_size: int) -> tuple[StateForm, ...]:
        """What a layer keeps, in the order in which programs take it."""

    def facts(self) -> dict[str, str]:
        """What the table of layers shows, by column; a column left out is a dash."""
        return {}
