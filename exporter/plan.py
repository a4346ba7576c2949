"""What a model's state will cost, before anything is traced.

KV bytes = layers x rows x 2 x (KV heads x head_dim) x bytes per element; a sliding layer has at most `window` rows.
All sizes are in bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from exporter.errors import ConfigError
from exporter.spec import CachePolicy, ModelSpec, StateSpec, state_specs

CONTEXTS = (512, 2048, 8192, 32768, 131072)

Kind = Literal["sliding", "global", "conv"]
KINDS: tuple[Kind, ...] = ("sliding", "global", "conv")
_KIND_OF: dict[str, Kind] = {"ring": "sliding", "full": "global", "conv": "conv"}


@dataclass(frozen=True)
class LayerState:
    """State of one layer: `row_bytes` a row, for keys and values together or for either.

    `rows` is the window of a sliding layer, beside which a ring has `slack` rows; the rows of a convolution; None in a
    global layer, which has one row a token.
    """

    layer: int
    kind: Kind
    row_bytes: int
    rows: int | None
    slack: int = 0

    def bytes(self, context: int) -> int:
        """Bytes allocated by a program made for `context` tokens when that many are in it."""
        if self.kind == "conv":
            assert self.rows is not None
            return self.row_bytes * self.rows
        return self.row_bytes * ((context if self.rows is None else min(self.rows, context)) + self.slack)

    def full_bytes(self, context: int) -> int:
        """Bytes without a window; a convolution has no longer form."""
        return self.bytes(context) if self.kind == "conv" else self.row_bytes * context


@dataclass(frozen=True)
class ContextPlan:
    """Bytes of state at one context. `full` is what they would be if every attention layer kept every row."""

    context: int
    sliding: int
    global_: int
    conv: int
    full: int

    @property
    def total(self) -> int:
        return self.sliding + self.global_ + self.conv


@dataclass(frozen=True)
class KindGrowth:
    """Bytes each further token adds to all layers of one kind: with full caches, and with rings."""

    kind: Kind
    layers: int
    full: int
    ring: int


def layer_states(states: Iterable[StateSpec]) -> tuple[LayerState, ...]:
    """The plan's view of the states in a manifest."""
    result = []
    for spec in states:
        rows = {"ring": spec.window, "full": None, "conv": spec.rows}[spec.kind]
        slack = spec.rows - spec.window if spec.window is not None else 0
        row_bytes = spec.row_bytes // len(spec.layers)
        result += [LayerState(layer, _KIND_OF[spec.kind], row_bytes, rows, slack) for layer in spec.layers]
    return tuple(result)


def model_states(model: ModelSpec, policy: CachePolicy) -> tuple[LayerState, ...]:
    """The plan's view of a model, at any context up to its longest."""
    return layer_states(state_specs(model, policy, model.max_position_embeddings))


def plan_context(states: Sequence[LayerState], context: int) -> ContextPlan:
    """The plan of a conversation that fills a context of `context` tokens, global layers at exactly that many rows."""
    size = {kind: sum(state.bytes(context) for state in states if state.kind == kind) for kind in KINDS}
    return ContextPlan(
        context=context,
        sliding=size["sliding"],
        global_=size["global"],
        conv=size["conv"],
        full=sum(state.full_bytes(context) for state in states),
    )


def plan_contexts(
    states: Sequence[LayerState], limit: int, contexts: Sequence[int] | None = None
) -> tuple[ContextPlan, ...]:
    """Plans at `contexts`; None means the usual ones below `limit`, and `limit`."""
    if contexts is None:
        contexts = [*(context for context in CONTEXTS if context < limit), limit]
    return tuple(plan_context(states, context) for context in contexts)


def growths(states: Sequence[LayerState]) -> tuple[KindGrowth, ...]:
    """What a token costs in each kind of layer the model has. A ring is allocated once and grows no further."""
    result = []
    for kind in KINDS:
        own = [state for state in states if state.kind == kind]
        if own:
            a_token = 0 if kind == "conv" else sum(state.row_bytes for state in own)
            layers = len({state.layer for state in own})
            result.append(KindGrowth(kind, layers, a_token, a_token if kind == "global" else 0))
    return tuple(result)


def parse_contexts(text: str) -> tuple[int, ...]:
    """``"8192,32768"`` to numbers of tokens.

    Raises:
        ConfigError: something that is no positive whole number.
    """
    try:
        contexts = tuple(int(part) for part in text.split(","))
    except ValueError:
        contexts = ()
    if not contexts or min(contexts) < 1:
        raise ConfigError(
            "--contexts", got=repr(text), expected="positive whole numbers with commas", repair="Write 8192,32768."
        )
    return contexts


def check_contexts(contexts: Iterable[int], limit: int) -> None:
    """Hold `contexts` against the most tokens the model takes.

    Raises:
        ConfigError: one is beyond `limit`.
    """
    if beyond := [context for context in contexts if context > limit]:
        raise ConfigError(
            "--contexts",
            got=", ".join(map(str, beyond)),
            expected=f"at most {limit}, the longest context of the model",
            repair="Ask for shorter contexts.",
        )
