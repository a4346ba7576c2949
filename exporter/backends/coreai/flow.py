"""A Core AI function as the `Flow` that the graph checks read.

Letters: L layers of a stacked state, Q query_len.

The checks have one state per layer, the program has stacks ``[L, rows, ...]``: layer k of ``slidingKeyCache`` is
``slidingKeyCache[k]`` here. A slice of one layer out of a stack reads that layer; a ``slice_update`` inside one layer,
followed by its ``write_handle``, writes it. Any other use of a whole stack is listed apart, for a check to refuse.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from exporter.backends.coreai.file import Function, Operation
from exporter.graph.flow import Flow, Step, Value
from exporter.spec import StateSpec

_SELECTIONS = frozenset(
    {"coreai.gather_along_axis", "coreai.gather_nd", "coreai.slice", "coreai.slice_update", "coreai.where",
     "coreai.decomposable.broadcasting_where"}
)  # fmt: skip
"""Operators with operands of integers or booleans that choose elements of another."""


def layer_states(states: Iterable[StateSpec]) -> tuple[StateSpec, ...]:
    """One state for each layer of each stack."""
    return tuple(
        state.model_copy(update={"name": layer_name(state.name, k), "layers": (layer,)})
        for state in states
        for k, layer in enumerate(state.layers)
    )


def layer_name(state: str, k: int) -> str:
    return f"{state}[{k}]"


@dataclass(frozen=True)
class LayerWrite:
    """One write to layer `layer` of a stack: `update` goes to the rows `begin` to `end`, both ``[rank]``; None when a
    state of one layer is replaced as a whole."""

    label: str
    state: str
    layer: int
    update: int
    begin: int | None
    end: int | None


@dataclass
class StateFlow:
    """A function's steps, and the reads and writes of its states.

    Args:
        layers: how many layers each state has.
        flow: the steps, over one state a layer.
        writes: in program order.
        reads: the values that are a copy of one layer, with its state and number.
        stacks: the values that are the whole of a state.
        whole: uses of a whole stack that take more than a part of one layer.
        stale: uses of a stack version that has been overwritten.
    """

    layers: dict[str, int]
    flow: Flow = field(default_factory=lambda: Flow({}, {}, frozenset(), frozenset(), (), ()))
    writes: list[LayerWrite] = field(default_factory=list)
    reads: dict[int, tuple[str, int]] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)
    whole: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)


def flow_of_function(function: Function, states: Iterable[StateSpec]) -> StateFlow:
    """The function's steps, its states taken apart by layer."""
    return _Reader(function, {state.name: len(state.layers) for state in states}).read()


class _Reader:
    def __init__(self, function: Function, layers: dict[str, int]) -> None:
        self.function, self.layers = function, layers
        self.handles = {state.value: state.name for state in function.states}
        self.current: dict[str, int] = {}
        self.pending: dict[int, LayerWrite] = {}
        self.steps: list[Step] = []
        self.constants: dict[Value, str] = {}
        self.parameters: set[str] = set()
        self.result = StateFlow(layers)

    def read(self) -> StateFlow:
        for index, operation in enumerate(self.function.operations):
            self._take(operation, f"{operation.name.rpartition('.')[2]}_{index}")
        types = self.function.types
        inputs: dict[Value, str] = {argument.value: argument.name for argument in self.function.inputs}
        inputs |= {
            layer_name(name, k): layer_name(name, k) for name, count in self.layers.items() for k in range(count)
        }
        self.result.flow = Flow(
            inputs=inputs,
            constants=self.constants,
            parameters=frozenset(self.parameters),
            scalars=frozenset(v for v, kind in types.items() if kind.is_integer and len(kind.shape) <= 1),
            steps=tuple(self.steps),
            outputs=tuple(argument.value for argument in self.function.outputs),
        )
        return self.result

    def _take(self, operation: Operation, label: str) -> None:
        name, operands = operation.name.removeprefix("coreai."), operation.operands
        if name == "constant":
            value = operation.results[0]
            self.constants[value] = label
            # A small number of integers is an index or a shape; everything else is a weight.
            if not self.function.types[value].is_integer or operation.constant is None:
                self.parameters.add(label)
        elif name == "read_handle":
            state = self.handles[operands[0]]
            self.current[state] = operation.results[0]
            self.result.stacks[operation.results[0]] = state
        elif name == "write_handle":
            self._write(self.handles[operands[0]], operands[1], label)
        elif name == "slice_update" and operands[0] in self.result.stacks:
            self._update(operation, label)
        elif name not in ("create_token", "output"):
            self._compute(operation, label)

    def _compute(self, operation: Operation, label: str) -> None:
        stacked = [v for v in operation.operands if v in self.result.stacks]
        for value in stacked:
            self._check_fresh(value, label)
        if operation.name == "coreai.get_shape":
            (value,) = operation.operands
            sizes = (layer_name(self.result.stacks[value], 0),) if stacked else (value,)
            self.steps.append(Step(label, operation.name, sizes=sizes, results=operation.results))
            return
        reads: list[Value] = [v for v in operation.operands if v not in stacked]
        for value in stacked:
            state = self.result.stacks[value]
            layer = self._layer(operation, state) if operation.name == "coreai.slice" else None
            if layer is not None:
                reads.append(layer_name(state, layer))
                self.result.reads[operation.results[0]] = (state, layer)
                continue
            if self.layers[state] > 1:
                self.result.whole.append(f"{label} takes the whole of {state}")
            reads += [layer_name(state, k) for k in range(self.layers[state])]
        self.steps.append(Step(label, operation.name, reads=tuple(reads), results=operation.results))

    def _update(self, operation: Operation, label: str) -> None:
        stack, begin, end, _, update = operation.operands
        state = self.result.stacks[stack]
        self._check_fresh(stack, label)
        layer = self._layer(operation, state)
        if layer is None and self.layers[state] == 1:
            layer = 0
        if layer is None:
            self.result.whole.append(f"{label} updates more than one layer of {state}")
            return
        (result,) = operation.results
        self.result.stacks[result] = state
        self.pending[result] = LayerWrite(label, state, layer, update, begin, end)

    def _write(self, state: str, value: int, label: str) -> None:
        write = self.pending.pop(value, None)
        self.current[state] = value
        if write is None and self.layers[state] == 1 and value not in self.result.stacks:
            write = LayerWrite(label, state, 0, value, None, None)
        if write is None or write.state != state:
            self.result.whole.append(f"{label} replaces the whole of {state}")
            return
        self.result.writes.append(write)
        target = layer_name(state, write.layer)
        indices = [value for value in (write.begin, write.end) if value is not None]
        self.steps.append(
            Step(
                write.label,
                "coreai.write",
                reads=(write.update,),
                writes=(target,),
                positions=(*indices, *self._gathered(write.update, state, write.layer)),
            )
        )

    def _check_fresh(self, value: int, label: str) -> None:
        state = self.result.stacks[value]
        if self.current[state] != value:
            self.result.stale.append(f"{label} uses {state} as it is not: before the last write, or ahead of the next")

    def _layer(self, operation: Operation, state: str) -> int | None:
        """The one layer that a slice or an update touches, when its first index is constant."""
        begin, end = (self._first(value) for value in operation.operands[1:3])
        count = self.layers[state]
        if begin is None or end is None:
            return None
        begin, end = begin % count, min(end, count)
        return begin if end - begin == 1 else None

    def _first(self, value: int) -> int | None:
        """The first number of an index, if it is a constant of the program."""
        producer = self.function.producers.get(value)
        if producer is None:
            return None
        if producer.constant is not None:
            return int(np.atleast_1d(producer.constant)[0])
        return self._first(producer.operands[1]) if producer.name == "coreai.concat" else None

    def _gathered(self, update: int, state: str, layer: int) -> list[Value]:
        """The indices and conditions of every selection between a layer's old rows and `update`."""
        carrying = carried(self.function, self.result, state, layer)
        found: list[Value] = []
        open_values, seen = [update], {update}
        while open_values:
            producer = self.function.producers.get(open_values.pop())
            if producer is None or not carrying & set(producer.results):
                continue
            if producer.name in _SELECTIONS:
                kinds = ((v, self.function.types.get(v)) for v in producer.operands)
                found += [v for v, kind in kinds if kind is not None and kind.is_integer]
            open_values += [v for v in producer.operands if v not in seen]
            seen.update(producer.operands)
        return list(dict.fromkeys(found))


def carried(function: Function, flow: StateFlow, state: str, layer: int) -> set[int]:
    """Every value that depends on the old rows of one layer."""
    found = {value for value, source in flow.reads.items() if source == (state, layer)}
    found |= {value for value, name in flow.stacks.items() if name == state and flow.layers[state] == 1}
    for operation in function.operations:
        moves = not operation.name.endswith(("_handle", ".get_shape"))
        if moves and found & set(operation.operands):
            found.update(operation.results)
    return found
