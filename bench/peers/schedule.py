"""LEAF: the order in which the contenders run, and the figures that are compared."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SHORT = 2048
"""Longer contexts are measured only in the first round: filling them takes most of the time."""


@dataclass(frozen=True)
class Slot:
    """One process: `name` is a peer's, or a preset of ours."""

    round: int
    index: int
    ours: bool
    name: str
    lengths: tuple[int, ...]
    scored: bool


def schedule(
    presets: Sequence[str], peers: Mapping[str, int | None], lengths: Sequence[int], rounds: int
) -> list[Slot]:
    """Ours and a peer by turns, so that a machine that slows down or speeds up does so for both.

    Presets of ours take turns too, and every round begins with another of them. Ours is measured over the lengths
    that the peer beside it can take; contexts beyond `SHORT` and the likelihood are measured once of everybody.

    Args:
        presets: names of ours, at least one.
        peers: name -> the most tokens it takes, None for no limit.
    """
    slots: list[Slot] = []
    scored: set[str] = set()
    stretched: set[str] = set()

    def add(number: int, ours: bool, name: str, longest: int | None) -> None:
        far = number == 0 and name not in stretched
        own = tuple(n for n in lengths if (longest is None or n < longest) and (far or n <= SHORT))
        if max(own, default=0) > SHORT:
            stretched.add(name)
        slots.append(Slot(number, len([s for s in slots if s.round == number]), ours, name, own, name not in scored))
        scored.add(name)

    names = list(peers)
    for number in range(rounds):
        for turn in range(max(len(presets), len(names))):
            peer = names[turn] if turn < len(names) else None
            add(number, True, presets[(turn + number) % len(presets)], peers[peer] if peer is not None else None)
            if peer is not None:
                add(number, False, peer, peers[peer])
    return slots


Figure = Callable[[Mapping[str, Any]], float | None]


def at(kind: str, length: int) -> Figure:
    """The figure of `kind` (``prefill``, ``decode``, ``peaks``) at one length."""
    return lambda result: result[kind].get(str(length))


def _short(result: Mapping[str, Any]) -> str | None:
    """`SHORT` tokens, or the longest there is, if all are shorter."""
    lengths = [length for length in map(int, result["peaks"]) if length <= SHORT]
    return str(max(lengths)) if lengths else None


def above_bare(result: Mapping[str, Any]) -> float | None:
    """The peak of a conversation of `SHORT` tokens above the bare process; the longest there is, if all are shorter."""
    length = _short(result)
    return None if length is None else result["peaks"][length] - result["bare_bytes"]


def resident(part: str) -> Figure:
    """What is resident after that conversation above the bare process, of one part of it: ``anonymous`` or ``file``;
    None of a result that was taken before the parts were told apart."""

    def figure(result: Mapping[str, Any]) -> float | None:
        length = _short(result)
        if length is None or "resident" not in result:
            return None
        return result["resident"][length][part] - result["bare"][part]

    return figure


def long_peak(result: Mapping[str, Any]) -> float | None:
    """The peak above the bare process of a run that went beyond `SHORT` tokens."""
    longest = max(map(int, result["peaks"]))
    return result["peak_bytes"] - result["bare_bytes"] if longest > SHORT else None


def key(name: str) -> Figure:
    return lambda result: result.get(name)


def by_round(runs: Sequence[Mapping[str, Any]], name: str, figure: Figure) -> dict[int, float]:
    """Of one contender: round -> median of the figure over its runs in that round, where there is one."""
    values: dict[int, list[float]] = {}
    for run in runs:
        value = figure(run["result"]) if run["name"] == name and run["result"] else None
        if value is not None:
            values.setdefault(run["round"], []).append(value)
    return {number: statistics.median(found) for number, found in values.items()}


def median(runs: Sequence[Mapping[str, Any]], name: str, figure: Figure) -> float | None:
    """Over the rounds."""
    found = by_round(runs, name, figure)
    return statistics.median(found.values()) if found else None


def ratio(runs: Sequence[Mapping[str, Any]], ours: str, peer: str, figure: Figure) -> float | None:
    """Ours over the peer's: the median of the ratios of the rounds that have both."""
    own, other = by_round(runs, ours, figure), by_round(runs, peer, figure)
    ratios = [own[number] / other[number] for number in own if number in other]
    return statistics.median(ratios) if ratios else None
