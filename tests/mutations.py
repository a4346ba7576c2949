"""Inputs that are nearly right: JSON values with one part replaced, dropped or doubled."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

ODD: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([
        None, True, False, 0, 1, -1, 2, 3.5, -0.5, 1e30, 2**31, 2**32 - 1, 2**63, 10**30, float("nan"), float("inf"),
        "", "a", "true", "[x]", "{{ x }}", "\x00", "½" * 3, [], [None], [[]], [1, "a"], {}, {"a": None}, {"content": 5},
    ]),
    st.text(max_size=4), st.integers(-3, 300),
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something could be replaced: every key and index on every level, of a long list its ends."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for index in {0, 1, len(value) // 2, len(value) - 1} & set(range(len(value))):
            yield from places(value[index], (*path, index))


@st.composite
def mutated(draw: st.DrawFn, value: Any, count: int = 2) -> Any:
    """`value` with up to `count` changes."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, count))):
        found = [place for place in places(value) if place] or [("",)]
        *path, last = found[draw(st.integers(0, 2**16)) % len(found)]
        holder = value
        for key in path:
            holder = holder[key]
        what = draw(st.sampled_from(["replace", "replace", "drop", "double", "swap"]))
        if not isinstance(holder, dict | list) or (isinstance(holder, dict) and last not in holder):
            continue
        if what == "drop":
            del holder[last]
        elif what == "double" and isinstance(holder, list):
            holder.insert(last, copy.deepcopy(holder[last]))
        elif what == "swap" and len(holder) > 1:
            others = list(range(len(holder)) if isinstance(holder, list) else holder)
            other = others[draw(st.integers(0, 2**16)) % len(others)]
            holder[last], holder[other] = holder[other], holder[last]
        else:
            holder[last] = copy.deepcopy(draw(ODD))  # the strategy hands out its own
    return value
