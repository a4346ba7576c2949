"""One form for both programs that are checked: straight-line steps over values.

Exported programs and lowered plans spell operators, aliases and writes differently. A flow has one form for both, so
each check of order, mutation and provenance is written once. A value is a node's name in an exported program and an
index in a plan.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

Value = Hashable

SCALAR_READS = frozenset({"aten::item", "aten::_local_scalar_dense"})
"""Operators that turn a tensor's content into a number of the program."""


@dataclass(frozen=True)
class Step:
    """One instruction.

    Args:
        label: what to call it in a report.
        operator: namespace and name without overload, e.g. ``aten::add``.
        reads: values whose content it uses.
        sizes: values of which it uses only the shape.
        results: values it defines.
        writes: tensors that existed before and are written in place.
        positions: the values that decide where in `writes` it writes.
        aliases: pairs (result, source) that share storage.
        data_shaped: whether the shape of its results depends on the content of what it reads.
    """

    label: str
    operator: str
    reads: tuple[Value, ...] = ()
    sizes: tuple[Value, ...] = ()
    results: tuple[Value, ...] = ()
    writes: tuple[Value, ...] = ()
    positions: tuple[Value, ...] = ()
    aliases: tuple[tuple[Value, Value], ...] = ()
    data_shaped: bool = False


@dataclass(frozen=True)
class Flow:
    """A program. `parameters` are the constants that are weights, buffers or floating-point data of the model."""

    inputs: dict[Value, str]
    constants: dict[Value, str]
    parameters: frozenset[str]
    scalars: frozenset[Value]
    steps: tuple[Step, ...]
    outputs: tuple[Value, ...]
    roots: dict[Value, Value] = field(init=False)

    def __post_init__(self) -> None:
        roots: dict[Value, Value] = {}
        for step in self.steps:
            for result, source in step.aliases:
                roots[result] = roots.get(source, source)
        object.__setattr__(self, "roots", roots)

    def root(self, value: Value) -> Value:
        """The value that owns the storage of `value`."""
        return self.roots.get(value, value)

    def input_name(self, value: Value) -> str | None:
        """The input whose storage `value` shares, if any."""
        return self.inputs.get(self.root(value))

    def writes_to_inputs(self) -> Iterator[tuple[int, Step, str]]:
        """Every write that lands in an input or a constant: (position, step, name)."""
        for index, step in enumerate(self.steps):
            for value in step.writes:
                root = self.root(value)
                name = self.inputs.get(root, self.constants.get(root))
                if name is not None:
                    yield index, step, name

    def live_reads(self) -> Iterator[tuple[int, Step, str]]:
        """Every read of an input on which an output depends: (position, step, input).

        Reads that only build the next content of a state (a ring rewritten by a gather) are left out.
        """
        live = {self.root(value) for value in self.outputs}
        found: list[tuple[int, Step, str]] = []
        for index in range(len(self.steps) - 1, -1, -1):
            step = self.steps[index]
            # Writing a state makes nothing live: a later read of the state counts by itself.
            written = {self.root(v) for v in step.writes if self.input_name(v) is None}
            if not live & ({self.root(v) for v in step.results if self.input_name(v) is None} | written):
                continue
            for value in step.reads:
                name = self.input_name(value)
                if name is None:
                    live.add(self.root(value))
                elif not any(value == source for _, source in step.aliases):
                    found.append((index, step, name))
            # A view of a state is not a read; using the view is.
        yield from reversed(found)
