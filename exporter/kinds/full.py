"""The full cache: keys and values of every token of a global layer, in order of position.

Rows are allocated as the conversation grows. Rows of dropped tokens go stale where they lie: attention reads rows below
S, each of which is written again before S reaches it.
"""

from __future__ import annotations

from typing import Any

from exporter.kinds.attention import KeyValueKind
from exporter.kinds.base import Layout, Rows, StateForm, StateSpec, register
from exporter.kinds.policy import CachePolicy, CacheSettings


@register
class Full(KeyValueKind):
    """Starts with a few rows and grows by the policy, unless the format wants the whole context at once."""

    name = "full"
    label = "global"
    line = "global layers"
    order = 1
    grows = True
    first_row = "S - Q"
    layer_keys = frozenset({"num_key_value_heads", "head_dim"})

    def rows(self, form: StateForm, policy: CachePolicy, context: int, layout: Layout) -> Rows:
        return Rows(context if layout == "static" else min(policy.initial_rows, context), context)

    def dtype(self, policy: CacheSettings) -> str:
        return policy.global_dtype or policy.dtype

    def planned_rows(self, rows: int | None, slack: int, context: int) -> int:
        return context + slack

    def used_rows(self, spec: StateSpec, length: int, high_water: int) -> int:
        return length

    def kept_rows(self, spec: StateSpec, length: int) -> int:
        return length

    def earliest(self, spec: StateSpec, length: int, high_water: int) -> int:
        return 0

    def writes_first(self, write_first: bool) -> bool:
        """A global layer's tokens attend to themselves: their rows are written first, in every program."""
        return True

    def row_of(self, position: Any, rows: int) -> Any:
        return position
