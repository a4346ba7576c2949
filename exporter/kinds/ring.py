"""The ring: keys and values of the last C tokens of a sliding layer.

Letters: C capacity (rows of a ring), W window, n tokens in a conversation, M its high-water mark.

Position p lives in row ``p mod C``. What a ring still holds is decided by M: writing position p overwrote position
p - C, and no rewind brings that back, so the oldest resident position is ``max(0, M - C)``, even after rewinding and
writing again (positions n..M-1 only replace their own stale rows). Position n attends to max(0, n - W + 1)..n - 1, and
later ones to nothing older, so a rewind to n > 0 is exact iff the ring never wrapped (M <= C), or
``n >= M - C + W - 1``, or W == 1, where nothing before n is attended to.

Stale rows then cannot be seen:

- A mask by position (a program that reads first, and one that writes first when C > W) takes row j to hold the newest
  position p <= newest with p % C == j. For a stale row that is a position of the last C, of which those inside the
  window are resident by the rule above, so the stale one lies outside the window or is negative, and is masked.
- A program that writes first with C == W has no mask and attends to the first min(S, W) rows. A ring that never wrapped
  has its stale rows at rows >= n, and they are written before S reaches them. A wrapped one may only go back to M - 1,
  whose one stale row is the very row that the next token overwrites before it attends.
"""

from __future__ import annotations

from typing import Any

from exporter.kinds.attention import KeyValueKind
from exporter.kinds.base import Layout, Rows, StateForm, StateSpec, register
from exporter.kinds.policy import CachePolicy, CacheSettings


@register
class Ring(KeyValueKind):
    """Never grows: C rows for ever, W of them attended to, the others kept for rewinding."""

    name = "ring"
    label = "sliding"
    line = "sliding layers, rings"
    order = 0
    first_row = "(S - Q) mod C"
    layer_keys = frozenset({"window", "num_key_value_heads", "head_dim"})

    def rows(self, form: StateForm, policy: CachePolicy, context: int, layout: Layout) -> Rows:
        """A window that outreaches the context never closes: the ring is then the whole context."""
        assert form.rows is not None
        window = min(form.rows, context)
        rows = window + self.slack(policy)
        return Rows(rows, rows, window)

    def slack(self, policy: CacheSettings) -> int:
        return policy.ring_slack

    def planned_rows(self, rows: int | None, slack: int, context: int) -> int:
        assert rows is not None
        return min(rows, context) + slack

    def fills_at(self, rows: int | None) -> int | None:
        return rows

    def oldest(self, spec: StateSpec, high_water: int) -> int:
        """The oldest position whose row is still there."""
        return max(0, high_water - spec.rows)

    def used_rows(self, spec: StateSpec, length: int, high_water: int) -> int:
        return max(0, length - self.oldest(spec, high_water))

    def earliest(self, spec: StateSpec, length: int, high_water: int) -> int:
        oldest = self.oldest(spec, high_water)
        if oldest == 0 or spec.window == 1:
            return 0
        assert spec.window is not None
        return oldest + spec.window - 1

    def lost(self, spec: StateSpec, high_water: int) -> tuple[str, str]:
        return (
            f"position {self.oldest(spec, high_water)} is the oldest still resident in the sliding layers",
            "Start over with reset(), or export with more `ring_slack`.",
        )

    def writes_first(self, write_first: bool) -> bool:
        """Chunks attend to a ring before they overwrite it; a single token is written before it is attended to."""
        return write_first

    def wrong_order(self, write_first: bool) -> str:
        if write_first:
            return (
                "read-first order: the token does not attend to itself, so a one-token program is traced by itself, "
                "never derived from the graph of a program for chunks"
            )
        return (
            "write-first order: a chunk's writes replace rows that its own early tokens still attend to, so a program "
            "for chunks is traced by itself, never derived from the graph of a one-token program"
        )

    def row_of(self, position: Any, rows: int) -> Any:
        return position % rows
