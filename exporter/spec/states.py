"""Which tensors the caller owns.

Letters: L layers that share a tensor, C capacity (rows of a ring), W window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from exporter.errors import ConfigError
from exporter.spec.base import DTYPE_BYTES, DType, Spec
from exporter.spec.model import ModelSpec, ShortConvSpec

StateRole = Literal["keys", "key_scales", "values", "value_scales", "inputs"]
SCALES: dict[StateRole, StateRole] = {"keys": "key_scales", "values": "value_scales"}
"""The state that scales the integers of another, by role."""


class StateSpec(Spec):
    """One tensor the caller allocates and passes to every program, which writes it in place.

    shape: ``[L, rows, num_heads, head_dim]`` for keys and values, ``[L, rows, num_heads, 1]`` for their scales (an int8
    row stands for integer times scale), ``[L, rows, hidden_size]`` for a convolution; L is the number of `layers` that
    share the tensor, each with its own part of axis 0. `rows` is the number to allocate first; a ``full`` state may
    grow to `max_rows` unless it is `static`, the others never change.
    """

    name: str
    layers: tuple[int, ...] = Field(min_length=1)
    kind: Literal["ring", "full", "conv"]
    role: StateRole
    rows: int
    max_rows: int
    window: int | None
    row_shape: tuple[int, ...]
    dtype: DType
    static: bool = False

    @property
    def grows(self) -> bool:
        return self.kind == "full" and not self.static

    @property
    def scales(self) -> str | None:
        """The name of the state that scales this one's integers, if it holds integers (of one layer then)."""
        return state_name(self.layers[0], SCALES[self.role]) if self.dtype == "int8" else None

    @property
    def row_bytes(self) -> int:
        """One row of every layer of it."""
        size = DTYPE_BYTES[self.dtype] * len(self.layers)
        for n in self.row_shape:
            size *= n
        return size

    def shape(self, rows: int | None = None) -> tuple[int, ...]:
        return (len(self.layers), self.rows if rows is None else rows, *self.row_shape)

    def bytes(self, rows: int | None = None) -> int:
        return self.row_bytes * (self.rows if rows is None else rows)


def state_name(layer: int, role: StateRole) -> str:
    return f"layer_{layer}_{role}"


CacheDType = Literal["float32", "float16", "int8"]


class CachePolicy(Spec):
    """How the caller's state is laid out. `ring_slack` rows beyond the window buy that many tokens of rewind.

    `dtype` is that of keys and values, `global_dtype` that of global layers where it differs; int8 is symmetric per row
    and KV head, with float32 scales beside it. The few rows of a convolution are float32 in any case. Formats in
    `STATE_DTYPES` keep to their own.
    """

    dtype: CacheDType = "float32"
    global_dtype: CacheDType | None = None
    ring_slack: int = Field(default=0, ge=0)
    initial_rows: int = Field(default=64, ge=1)
    growth: Literal["double", "1.5x"] = "double"

    @property
    def dtypes(self) -> dict[Literal["ring", "full"], CacheDType]:
        """Of either kind of attention state."""
        return {"ring": self.dtype, "full": self.global_dtype or self.dtype}

    @property
    def caches(self) -> str:
        """The dtypes in words."""
        return dtypes_in_words(self.dtype, self.global_dtype)

    def grown_rows(self, rows: int, needed: int, max_rows: int) -> int:
        """The rows a growing state takes next: the smallest step of the policy that holds `needed`."""
        while rows < needed:
            rows = rows * 2 if self.growth == "double" else rows + (rows + 1) // 2
        return min(rows, max_rows)


def dtypes_in_words(dtype: str, global_dtype: str | None) -> str:
    return dtype if global_dtype in (None, dtype) else f"{dtype} (global layers {global_dtype})"


def cache_states(
    *, layer: int, kind: Literal["ring", "full"], rows: int, max_rows: int, window: int | None,
    row_shape: tuple[int, ...], dtype: DType,
) -> tuple[StateSpec, ...]:  # fmt: skip
    """The states of one attention layer; `row_shape` and `dtype` are those of its keys and values."""
    states = []
    for role, scales in SCALES.items():
        parts: list[tuple[StateRole, tuple[int, ...], DType]] = [(role, row_shape, dtype)]
        if dtype == "int8":
            parts.append((scales, (*row_shape[:-1], 1), "float32"))
        for part, shape, own in parts:
            states.append(
                StateSpec(
                    name=state_name(layer, part), layers=(layer,), kind=kind, role=part, rows=rows, max_rows=max_rows,
                    window=window, row_shape=shape, dtype=own,
                )
            )  # fmt: skip
    return tuple(states)


Layout = Literal["per_layer", "stacked", "static"]
"""How a program takes its states. ``per_layer``: each its own tensor. ``stacked``: those of equal kind and role in one,
the layers on axis 0. ``static``: per layer, and full states at the whole context from the start."""

STACKED_NAMES: dict[tuple[str, StateRole], str] = {
    ("full", "keys"): "globalKeyCache", ("full", "values"): "globalValueCache",
    ("ring", "keys"): "slidingKeyCache", ("ring", "values"): "slidingValueCache",
    ("conv", "inputs"): "convInputCache",
}  # fmt: skip


def state_specs(
    model: ModelSpec, policy: CachePolicy, max_context_length: int, layout: Layout = "per_layer",
    dtype: DType | None = None,
) -> tuple[StateSpec, ...]:  # fmt: skip
    """The state of `model` in the order in which programs take it: layer by layer, keys before values, each followed
    by its scales if it has any. `dtype` is that of every state; None means the policy's.

    Raises:
        ConfigError: ``stacked`` over int8, or over layers of one kind whose rows differ.
    """
    states: list[StateSpec] = []
    for index, layer in enumerate(model.layers):
        mixer = layer.mixer
        if isinstance(mixer, ShortConvSpec):
            rows = mixer.kernel_size - 1
            states.append(
                StateSpec(
                    name=state_name(index, "inputs"), layers=(index,), kind="conv", role="inputs", rows=rows,
                    max_rows=rows, window=None, row_shape=(model.hidden_size,), dtype=dtype or "float32",
                )
            )  # fmt: skip
            continue
        if mixer.window is None:
            kind: Literal["ring", "full"] = "full"
            rows = max_context_length if layout == "static" else min(policy.initial_rows, max_context_length)
            window, max_rows = None, max_context_length
        else:
            # A window that outreaches the context never closes: the ring is then the whole context.
            kind, window = "ring", min(mixer.window, max_context_length)
            rows = max_rows = window + policy.ring_slack
        states += cache_states(
            layer=index, kind=kind, rows=rows, max_rows=max_rows, window=window, dtype=dtype or policy.dtypes[kind],
            row_shape=(mixer.num_key_value_heads, mixer.head_dim),
        )  # fmt: skip
    return laid_out(states, layout)


def laid_out(states: Sequence[StateSpec], layout: Layout) -> tuple[StateSpec, ...]:
    """`states`, one layer each, as a program of that layout takes them. Raises as `state_specs`."""
    if layout == "static":
        return tuple(state.model_copy(update={"static": True}) for state in states)
    return stacked(states) if layout == "stacked" else tuple(states)


def stacked(states: Sequence[StateSpec]) -> tuple[StateSpec, ...]:
    """`states` of equal kind and role as one, in the order of `STACKED_NAMES`."""
    stacks = []
    for (kind, role), name in STACKED_NAMES.items():
        own = [state for state in states if (state.kind, state.role) == (kind, role)]
        forms = {(state.rows, state.row_shape, state.dtype) for state in own}
        if len(forms) > 1 or any(state.dtype == "int8" for state in own):
            raise ConfigError(
                f"states {name}",
                got="; ".join(f"{rows} rows of {shape} {dtype}" for rows, shape, dtype in sorted(forms)),
                expected="one float shape for all layers of a kind: they share one tensor in this format",
                repair="Leave this target out for this model, or use float caches.",
            )
        if own:
            layers = tuple(layer for state in own for layer in state.layers)
            stacks.append(own[0].model_copy(update={"name": name, "layers": layers}))
    return tuple(stacks)
