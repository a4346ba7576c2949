"""What a value depends on: the shapes of inputs, the content of inputs, constants."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from exporter.graph.flow import SCALAR_READS, Flow, Value


@dataclass(frozen=True)
class Provenance:
    """What a value depends on.

    Args:
        shapes: inputs of which only the shape matters.
        data: inputs whose content matters.
        constants: parameters, buffers and lifted constants.
        scalar_reads: the steps that turned a tensor's content into a number for it.
    """

    shapes: frozenset[str] = frozenset()
    data: frozenset[str] = frozenset()
    constants: frozenset[str] = frozenset()
    scalar_reads: frozenset[str] = frozenset()

    def __or__(self, other: Provenance) -> Provenance:
        return Provenance(
            self.shapes | other.shapes,
            self.data | other.data,
            self.constants | other.constants,
            self.scalar_reads | other.scalar_reads,
        )

    def __str__(self) -> str:
        parts = [
            f"{kind} of {', '.join(sorted(names))}"
            for kind, names in (("shape", self.shapes), ("data", self.data), ("constants", self.constants))
            if names
        ]
        return "; ".join(parts) or "literals"


NOTHING = Provenance()


class Trace:
    """The provenance of every value of a flow, with writes in place taken into account in program order.

    `positions[i]` is the provenance of the values that place the write of step i, `reads[i]` of all it reads, as of
    that step.
    """

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._content: dict[Value, Provenance] = {}
        self._shape: dict[Value, Provenance] = {}
        self._written: dict[Value, Provenance] = {}
        for value, name in flow.inputs.items():
            self._content[value] = Provenance(data=frozenset({name}))
            self._shape[value] = Provenance(shapes=frozenset({name}))
        for value, name in flow.constants.items():
            self._content[value] = Provenance(constants=frozenset({name}))
        self.positions: list[Provenance] = []
        self.reads: list[Provenance] = []
        for step in flow.steps:
            self._take(step.label, step.operator in SCALAR_READS, len(self.reads))

    def of(self, value: Value) -> Provenance:
        """The provenance of the content of `value`, after the last step."""
        return self._content.get(value, NOTHING) | self._written.get(self._flow.root(value), NOTHING)

    def shape_of(self, value: Value) -> Provenance:
        """The provenance of the shape of `value`."""
        return self._shape.get(value, NOTHING)

    def _take(self, label: str, is_scalar_read: bool, index: int) -> None:
        step = self._flow.steps[index]
        read = union(self.of(v) for v in step.reads)
        shape = union(self.shape_of(v) for v in (*step.reads, *step.sizes))
        shape |= union(self.of(v) for v in step.reads if v in self._flow.scalars)
        if step.data_shaped:
            shape |= read
        content = read | union(self.shape_of(v) for v in step.sizes)
        if is_scalar_read:
            content |= Provenance(scalar_reads=frozenset({label}))
        self.reads.append(content)
        self.positions.append(union(self.of(v) for v in step.positions))
        for value in step.results:
            self._content[value] = content
            self._shape[value] = shape
        for value in step.writes:
            root = self._flow.root(value)
            self._written[root] = self._written.get(root, NOTHING) | content | self.positions[-1]


def union(parts: Iterable[Provenance]) -> Provenance:
    total = NOTHING
    for part in parts:
        total |= part
    return total
