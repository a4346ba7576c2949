"""Which reads and writes of states may share the caller's memory.

By definition `read_state` copies a state into a new value and `write_state` copies a value into a state. Copying a
global cache twice a token would dominate everything, so a program is run with as few copies as its own order of reads
and writes allows, and with the very same results:

- A read hands out the caller's tensor itself, unless some value that may share its memory (itself, or a view of it) is
  still needed after a write to that state.
- A `slice_update` of what was read writes into the caller's tensor when its result is what is written to that state
  next, nothing reads the state in between, and no value that may share the old memory is needed after it. The
  `write_state` that follows then has nothing left to do.

Everything starts shared; `plan` takes sharing back until no write can be seen by a value read before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from exporter.backends.coreml.evaluator.operators import OPERATORS
from exporter.backends.coreml.evaluator.program_text import Operation, last_uses

Shares = dict[str, dict[int, object]]
"""For each value the reads, and the updates in place, whose memory it may share: their places, with their states."""


@dataclass
class StatePlan:
    """Places of operations. `copied_reads` copy; `in_place` updates write into the state, and their `done_writes` are
    skipped; every other write copies its value into the state."""

    copied_reads: set[int] = field(default_factory=set)
    in_place: dict[int, int] = field(default_factory=dict)
    """Place of the update -> place of its write."""

    @property
    def done_writes(self) -> set[int]:
        return set(self.in_place.values())


def plan(operations: Sequence[Operation], outputs: Sequence[str]) -> StatePlan:
    """The sharing that the order of `operations` allows."""
    uses = last_uses(operations, outputs)
    result = StatePlan(in_place=_candidates(operations))
    while _take_back(operations, uses, result):
        pass
    return result


def _candidates(operations: Sequence[Operation]) -> dict[int, int]:
    """Updates of a state's whole content whose result is the next thing that happens to that state."""
    found = {}
    for place, operation in enumerate(operations):
        if operation.type != "slice_update":
            continue
        source = operation.one("x")
        read = next((i for i, o in enumerate(operations[:place]) if source in o.outputs), None)
        if read is None or operations[read].type != "read_state":
            continue
        state = operations[read].one("input")
        events = [
            i for i, o in enumerate(operations[read + 1 :], read + 1)
            if o.type in ("read_state", "write_state") and o.one("input") == state
        ]  # fmt: skip
        if events:
            write = operations[events[0]]
            if write.type == "write_state" and write.one("data") == operation.outputs[0]:
                found[place] = events[0]
    return found


def _take_back(operations: Sequence[Operation], uses: dict[str, int], result: StatePlan) -> bool:
    """Find a write that a value read earlier would see, undo a sharing because of it; say whether there was one."""
    shares: Shares = {}
    for place, operation in enumerate(operations):
        own, written = _effect(operations, place, shares, result)
        if written is not None:
            if place in result.in_place and not _may_write(operation, shares, written):
                del result.in_place[place]
                return True
            for name, origins in shares.items():
                threatened = [origin for origin, state in origins.items() if state == written]
                if threatened and uses.get(name, -1) > place:
                    _undo(result, place, threatened)
                    return True
        shares |= dict.fromkeys(operation.outputs, own)
    return False


def _effect(
    operations: Sequence[Operation], place: int, shares: Shares, result: StatePlan
) -> tuple[dict[int, object], object]:
    """What the results of an operation may share memory with, and the state that it writes, if any."""
    operation = operations[place]
    match operation.type:
        case "read_state":
            return ({} if place in result.copied_reads else {place: operation.one("input")}), None
        case "write_state":
            return {}, None if place in result.done_writes else operation.one("input")
        case "slice_update":
            if place not in result.in_place:
                return {}, None
            state = operations[result.in_place[place]].one("input")
            return {place: state}, state
    own: dict[int, object] = {}
    if OPERATORS[operation.type].view:
        for name in operation.names():
            own |= shares.get(name, {})
    return own, None


def _undo(result: StatePlan, place: int, threatened: Sequence[int]) -> None:
    """The write at `place` becomes a copy if it was in place; else what it threatens gets memory of its own."""
    if place in result.in_place:
        del result.in_place[place]
        return
    for origin in threatened:
        if result.in_place.pop(origin, None) is None:
            result.copied_reads.add(origin)


def _may_write(operation: Operation, shares: Shares, state: object) -> bool:
    """Whether the updated value is the state's own memory and the update's rows are not."""
    source, rows = operation.one("x"), operation.one("update")
    assert isinstance(source, str)
    shared = shares.get(rows, {}) if isinstance(rows, str) else {}
    return state in shares.get(source, {}).values() and state not in shared.values()
