"""Where the writes of a saved function land, computed for concrete lengths.

Letters: Q query_len, S seq_len, C rows of a state.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from exporter.backends.coreml.file import Function, Operation, Package
from exporter.backends.coreml.flow import producers
from exporter.backends.coreml.lengths import Lengths, NotComputable
from exporter.graph.contract import ProgramContract
from exporter.graph.index_proof import Lengths as Call
from exporter.graph.index_proof import sample_lengths
from exporter.spec import CheckResult, StateSpec


def write_index_is_definition(package: Package, function: Function, contract: ProgramContract) -> CheckResult:
    """Computed for sampled lengths, every write covers the rows the definition says.

    A slice starts at the row of position S - Q (``(S - Q) mod C`` in a ring) and is Q rows long. A state rewritten by a
    gather over itself and the chunk takes, for each row, the chunk's newest token that belongs on it, or the old row
    where there is none.
    """
    calls = sample_lengths(contract)
    states = contract.positional
    made = producers(function)
    problems, kinds = [], {"slice_update": 0, "gather": 0}
    for operation in function.operations:
        state = states.get(operation.inputs["input"][0]) if operation.type == "write_state" else None
        if state is None:
            continue
        writer = made.get(operation.inputs["data"][0])
        if writer is None or writer.type not in kinds:
            problems.append(f"{state.name} is written from {writer.type if writer else operation.inputs['data'][0]}")
            continue
        kinds[writer.type] += 1
        problem = Write(package, function, state, writer).problem(calls)
        problems += [] if problem is None else [problem]
    evidence = (
        f"{kinds['slice_update']} slices and {kinds['gather']} gathers computed for {len(calls)} pairs of lengths"
    )
    return contract.result("write_index_is_definition", problems, evidence)


@dataclass(frozen=True)
class Write:
    """The operator that computes the new content of a state."""

    package: Package
    function: Function
    state: StateSpec
    operation: Operation

    def problem(self, calls: list[Call]) -> str | None:
        """The first problem, if there is one."""
        if not self.starts_from_the_state():
            return f"{self.state.name} is written from {self.operation.name}, which does not start from its own rows"
        for call in calls:
            sizes: dict[str, tuple[int, ...]] = dict(
                zip(self.function.inputs, ((1, call.query_len), (1, call.seq_len)), strict=True)
            )
            lengths = Lengths(self.package, self.function, sizes)
            try:
                wrong = (
                    self.slice(lengths, call) if self.operation.type == "slice_update" else self.gather(lengths, call)
                )
            except NotComputable as reason:
                wrong = str(reason)
            if wrong is not None:
                return f"{self.state.name} at Q={call.query_len} S={call.seq_len}: {wrong}"
        return None

    def starts_from_the_state(self) -> bool:
        """Whether unchanged rows are the state's own: a slice's base, or the first part of a gather's source."""
        made = producers(self.function)
        (base,) = self.operation.inputs["x"]
        if self.operation.type == "gather":
            source = made.get(base)
            if source is None or source.type != "concat":
                return False
            base = source.inputs["values"][0]
        read = made.get(base)
        return read is not None and read.type == "read_state" and read.inputs["input"] == (self.state.name,)

    def slice(self, lengths: Lengths, call: Call) -> str | None:
        begin, end = (lengths.one(self.operation, name).tolist() for name in ("begin", "end"))
        free = lengths.one(self.operation, "end_mask") if self.operation.one("end_mask") else [False] * len(end)
        shape = self.state.shape()
        start = self.state.cache_kind.row_of(call.offset, self.state.rows)
        want = [shape[0], start + call.query_len, *shape[2:]]
        if begin != [0, start, *(0 for _ in shape[2:])] or any(
            got != expected and not open_ended for got, expected, open_ended in zip(end, want, free, strict=True)
        ):
            return f"rows {begin[1]} to {end[1]}, expected {start} to {start + call.query_len}"
        return None

    def gather(self, lengths: Lengths, call: Call) -> str | None:
        taken, want = lengths.one(self.operation, "indices"), row_sources(self.state, call)
        if taken.shape != want.shape:
            return f"{taken.shape} indices, expected {want.shape}"
        wrong = np.flatnonzero(taken != want)
        return f"slot {wrong[0]} takes row {taken[wrong[0]]}, expected {want[wrong[0]]}" if wrong.size else None


def row_sources(state: StateSpec, call: Call) -> np.ndarray:
    """The row of ``[state, chunk]`` that each row takes, int64 ``[C]``, directly from the definition."""
    sources = np.arange(state.rows)
    for position in range(call.offset, call.seq_len):
        row = state.cache_kind.row_of(position, state.rows)
        if row is not None:
            sources[row] = state.rows + position - call.offset
    return sources
