"""What a model's state will cost, before anything is traced.

KV bytes = layers x rows x 2 x (KV heads x head_dim) x bytes per element; a sliding layer has at most `window` rows.
All sizes are in bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from exporter.errors import ConfigError
from exporter.lengths import usual_contexts
from exporter.spec import KINDS, CacheKind, CachePolicy, ModelSpec, StateSpec, kind_labelled, state_specs


@dataclass(frozen=True)
class LayerState:
    """State of one layer: `row_bytes` a row, for all states of its kind together or for one of them.

    `kind` is what people call the layer. `rows` is the number that the model itself gives (the window of a sliding
    layer, the inputs of a convolution), beside which there are `slack` rows; None where every token has a row.
    """

    layer: int
    kind: str
    row_bytes: int
    rows: int | None
    slack: int = 0

    @property
    def cache_kind(self) -> CacheKind:
        return kind_labelled(self.kind)

    def bytes(self, context: int) -> int:
        """Bytes allocated by a program made for `context` tokens when that many are in it."""
        return self.row_bytes * self.cache_kind.planned_rows(self.rows, self.slack, context)

    def full_bytes(self, context: int) -> int:
        """Bytes if no token were ever dropped; what keeps no tokens has no longer form."""
        return self.row_bytes * self.cache_kind.full_rows(self.rows, context)

    @property
    def fills_at(self) -> int | None:
        """The context from which on it grows no further; None if it always grows, or never."""
        return self.cache_kind.fills_at(self.rows)


@dataclass(frozen=True)
class ContextPlan:
    """Bytes of state at one context: of every kind of layer, and what they would be if every attention layer kept every
    row."""

    context: int
    kinds: Mapping[str, int]
    full: int

    @property
    def total(self) -> int:
        return sum(self.kinds.values())


@dataclass(frozen=True)
class KindGrowth:
    """Bytes each further token adds to all layers of one kind: with full caches, and as they are."""

    kind: str
    layers: int
    full: int
    ring: int


def layer_states(states: Iterable[StateSpec]) -> tuple[LayerState, ...]:
    """The plan's view of the states in a manifest."""
    result = []
    for spec in states:
        kind = spec.cache_kind
        own = spec.rows if spec.window is None else spec.window
        row_bytes = spec.row_bytes // len(spec.layers)
        rows = None if kind.grows else own
        slack = 0 if kind.grows else spec.rows - own
        result += [LayerState(layer, kind.label, row_bytes, rows, slack) for layer in spec.layers]
    return tuple(result)


def model_states(model: ModelSpec, policy: CachePolicy) -> tuple[LayerState, ...]:
    """The plan's view of a model, at any context up to its longest."""
    return layer_states(state_specs(model, policy, model.max_position_embeddings))


def plan_context(states: Sequence[LayerState], context: int) -> ContextPlan:
    """The plan of a conversation that fills a context of `context` tokens, growing states at exactly that many rows."""
    kinds = dict.fromkeys((kind.label for kind in KINDS.values()), 0)
    for state in states:
        kinds[state.kind] += state.bytes(context)
    return ContextPlan(context, kinds, sum(state.full_bytes(context) for state in states))


def plan_contexts(
    states: Sequence[LayerState], limit: int, contexts: Sequence[int] | None = None
) -> tuple[ContextPlan, ...]:
    """Plans at `contexts`; None means the usual ones below `limit`, and `limit`."""
    contexts = usual_contexts(limit) if contexts is None else contexts
    return tuple(plan_context(states, context) for context in contexts)


def growths(states: Sequence[LayerState]) -> tuple[KindGrowth, ...]:
    """What a token costs in each kind of layer the model has. A ring is allocated once and grows no further."""
    result = []
    for kind in KINDS.values():
        own = [state for state in states if state.kind == kind.label]
        if own:
            a_token = sum(state.full_bytes(2) - state.full_bytes(1) for state in own)
            layers = len({state.layer for state in own})
            result.append(KindGrowth(kind.label, layers, a_token, a_token if kind.grows else 0))
    return tuple(result)


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
