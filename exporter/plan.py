"""What a model's state will cost, before anything is traced.

KV bytes = layers x rows x 2 x (KV heads x head_dim) x bytes per element; a sliding layer has at most `window` rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from exporter.spec import CachePolicy, ModelSpec, StateSpec, state_specs

CONTEXTS = (512, 2048, 8192, 32768, 131072)


@dataclass(frozen=True)
class ContextPlan:
    """Bytes of state at one context, in bytes. `full` is what they would be if every layer kept every row."""

    context: int
    sliding: int
    global_: int
    conv: int
    full: int

    @property
    def total(self) -> int:
        return self.sliding + self.global_ + self.conv


def plan_context(model: ModelSpec, policy: CachePolicy, context: int) -> ContextPlan:
    """The plan of a conversation of `context` tokens, global layers at exactly that many rows."""
    states = state_specs(model, policy, context)

    def total(kind: str) -> int:
        return sum(state.bytes(state.max_rows) for state in states if state.kind == kind)

    return ContextPlan(
        context=context,
        sliding=total("ring"),
        global_=total("full"),
        conv=total("conv"),
        full=sum(unbounded_bytes(state, context) for state in states),
    )


def unbounded_bytes(state: StateSpec, context: int) -> int:
    """What the state would take without a window; a convolution has no longer form."""
    return state.bytes() if state.kind == "conv" else state.bytes(context)


def plan_contexts(model: ModelSpec, policy: CachePolicy, limit: int) -> tuple[ContextPlan, ...]:
    """Plans at the usual contexts below `limit`, and at `limit`."""
    contexts: Sequence[int] = [context for context in CONTEXTS if context < limit]
    return tuple(plan_context(model, policy, context) for context in (*contexts, limit))
