"""A function of a package as a `Flow`, for the checks that all formats share.

`read_state` returns the state as it is at that point, whenever its result is used. A `write_state` is placed by every
index between the state's old content and the new one.
"""

from __future__ import annotations

from collections.abc import Iterator

from exporter.backends.coreml.file import Function, Operation
from exporter.graph.flow import Flow, Step

# Parameters that say where rows go or come from, and parameters that determine a result's shape.
_POSITIONS = {
    "slice_update": ("begin", "end", "stride"),
    "gather": ("indices",),
    "gather_along_axis": ("indices",),
    "scatter": ("indices",),
    "scatter_along_axis": ("indices",),
    "scatter_nd": ("indices",),
    "slice_by_index": ("begin", "end", "stride"),
    "slice_by_size": ("begin", "size"),
    "select": ("cond",),
}
_SHAPES = {
    "reshape": ("shape",), "fill": ("shape",), "range_1d": ("start", "end", "step"), "tile": ("reps",),
    "slice_by_index": ("begin", "end", "stride"), "slice_by_size": ("begin", "size"), "expand_dims": ("axes",),
}  # fmt: skip


def flow_of(function: Function) -> Flow:
    """The function as steps; its inputs and states keep their names. Integers of the program are literals, not
    constants of the flow."""
    weights = frozenset(
        name for name in function.constants if function.types[name].dtype not in {"int32", "bool", "string"}
    )
    steps: list[Step] = []
    for operation in function.operations:
        steps += _steps(function, operation)
    return Flow(
        inputs={name: name for name in (*function.inputs, *function.states)},
        constants={name: name for name in weights},
        parameters=weights,
        scalars=frozenset(),
        steps=tuple(steps),
        outputs=function.outputs,
    )


def _steps(function: Function, operation: Operation) -> Iterator[Step]:
    label, operator = operation.name, f"mil::{operation.type}"
    if operation.type == "write_state":
        (state,), (data,) = operation.inputs["input"], operation.inputs["data"]
        places = tuple(dict.fromkeys(positions(function, data, state)))
        yield Step(label, operator, reads=(data,), writes=(state,), positions=places)
        return
    bound = [(parameter, name) for parameter, names in operation.inputs.items() for name in names]
    if operation.type == "shape":
        yield Step(label, operator, sizes=tuple(name for _, name in bound), results=tuple(operation.outputs))
        return
    shaping = tuple(name for parameter, name in bound if parameter in _SHAPES.get(operation.type, ()))
    reads = tuple(name for _, name in bound)
    if shaping:  # the content of these is the shape of the result
        made = f"shape of {label}"
        yield Step(made, "mil::shape_argument", reads=shaping, results=(made,), data_shaped=True)
        reads += (made,)
    yield Step(label, operator, reads=reads, results=tuple(operation.outputs))


def producers(function: Function) -> dict[str, Operation]:
    return {name: operation for operation in function.operations for name in operation.outputs}


def positions(function: Function, value: str, state: str) -> Iterator[str]:
    """Every index between the old content of `state` and `value`."""
    made = producers(function)
    carries: set[str] = set()
    for operation in function.operations:
        bound = {name for names in operation.inputs.values() for name in names}
        if (operation.type == "read_state" and state in bound) or carries & bound:
            carries |= operation.outputs.keys()
    seen: set[str] = set()
    open_values = [value]
    while open_values:
        name = open_values.pop()
        if name in seen or name not in carries:
            continue
        seen.add(name)
        operation = made[name]
        for parameter in _POSITIONS.get(operation.type, ()):
            yield from operation.inputs.get(parameter, ())
        open_values += [part for names in operation.inputs.values() for part in names]
