"""A lowered plan as a `Flow`: kernels write their out arguments, delegates are opaque."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from executorch.exir import schema
from executorch.exir.scalar_type import ScalarType

from exporter.backends.executorch.file import Plan
from exporter.errors import GraphContractError
from exporter.graph.flow import Flow, Step, Value

_SHAPE_ONLY = frozenset({"aten::sym_size", "aten::sym_numel"} | {
    f"aten::{name}_like" for name in ("zeros", "ones", "full", "empty", "rand")
})  # fmt: skip
_DATA_SHAPED = frozenset({"aten::nonzero", "aten::masked_select", "aten::index"})
_VIEW = "executorch_prim::et_view"
_INTEGERS = (ScalarType.LONG, ScalarType.INT, ScalarType.BOOL)
_POSITIONS = {"llama::update_cache": (2,), "llama::update_cache_with_indices": (2, 3)}


def flow_of_plan(plan: Plan, names: tuple[str, ...]) -> Flow:
    """The plan as steps, its inputs called `names`.

    Raises:
        GraphContractError: the plan does not take as many inputs as there are names, or reads what nothing wrote.
    """
    # Without these schemas, writes to a cache would look like new results.
    from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401  registers llama::*

    if len(plan.inputs) != len(names):
        raise GraphContractError(
            "graph checks",
            got=f"{len(plan.inputs)} inputs of method {plan.name}",
            expected=f"{len(names)} ({', '.join(names)})",
            repair="The states are inputs, one each, in the order of the state specs.",
        )
    reader = _Reader(plan, dict(zip(plan.inputs, names, strict=True)))
    steps = tuple(step for i, call in enumerate(plan.instructions) for step in reader.steps(i, call))
    return Flow(
        inputs=dict(reader.inputs.items()),
        constants=dict(reader.constants.items()),
        # Integers are folded arithmetic, such as an offset or a table of slots. The rest are weights.
        parameters=frozenset(
            name for value, name in reader.constants.items() if plan.scalar_type(value) not in _INTEGERS
        ),
        scalars=frozenset(i for i, value in enumerate(plan.values) if not isinstance(value, schema.Tensor)),
        steps=steps,
        outputs=plan.outputs,
    )


@cache
def _schema(operator: str) -> torch.FunctionSchema | None:
    """The operator's schema, if this process has it registered."""
    namespace, _, rest = operator.partition("::")
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    found = getattr(packet, overload or "default", None)
    return None if found is None else found._schema


class _Reader:
    def __init__(self, plan: Plan, inputs: dict[int, str]) -> None:
        self.plan, self.inputs = plan, inputs
        self.constants: dict[int, str] = {
            i: f"constant {value.data_buffer_idx}"
            for i, value in enumerate(plan.values)
            if isinstance(value, schema.Tensor) and value.data_buffer_idx > 0 and i not in inputs
        }
        self._defined: set[int] = {i for i, v in enumerate(plan.values) if not isinstance(v, schema.Tensor)}
        self._defined |= set(inputs) | set(self.constants)
        self._held: dict[tuple[int, int], int] = {}
        self._roots: dict[int, int] = {}

    def steps(self, index: int, call: schema.InstructionArguments) -> Iterator[Step]:
        """The instruction, preceded by the views it reads that have no instruction of their own."""
        if isinstance(call, schema.KernelCall):
            step = self._kernel(index, call)
        elif isinstance(call, schema.DelegateCall):
            step = self._delegate(index, call)
        elif isinstance(call, schema.MoveCall):
            step = Step(f"#{index} move", "move", reads=(call.move_from,), results=(call.move_to,))
        else:
            return  # freeing moves no data
        for value in (*step.reads, *step.sizes):
            if value not in self._defined:
                yield self._static_view(index, value)
        for value in step.results:
            self._define(value)
        yield step

    def _define(self, value: Value) -> None:
        assert isinstance(value, int)
        self._defined.add(value)
        place = self.plan.place(value)
        if place is not None:
            self._held[place] = value

    def _static_view(self, index: int, value: Value) -> Step:
        """A view of fixed shape has no instruction: the planner gives it the place of its base tensor.

        Raises:
            GraphContractError: nothing was written at that place.
        """
        assert isinstance(value, int)
        source = self._held.get(self.plan.place(value) or (-1, -1))
        if source is None:
            raise GraphContractError(
                "pte reader",
                got=f"method {self.plan.name}, whose instruction {index} reads value {value}, which nothing wrote",
                expected="every value to be an input, a constant or a result",
                repair="The file is damaged, or uses a kind of view this reader does not know.",
            )
        self._defined.add(value)
        self._roots[value] = self._root(source)
        return Step(f"#{index} view", "view", reads=(source,), results=(value,), aliases=((value, source),))

    def _delegate(self, index: int, call: schema.DelegateCall) -> Step:
        arguments = self._flat(call.args)
        delegate = self.plan.delegates[call.delegate_index]
        if delegate.inputs is not None:
            reads, results = arguments[: delegate.inputs], arguments[delegate.inputs :]
        else:
            reads = [v for v in arguments if v in self._defined]
            results = [v for v in arguments if v not in self._defined]
            # A payload does not say which arguments it reads: an apparent result may be a view.
            reads += [self._held[p] for v in results if (p := self.plan.place(v)) in self._held]
        return Step(
            label=f"#{index} {delegate.backend}[{call.delegate_index}]",
            operator=f"delegate::{delegate.backend}",
            reads=tuple(reads),
            results=tuple(results),
        )

    def _kernel(self, index: int, call: schema.KernelCall) -> Step:
        name = self.plan.operators[call.op_index]
        operator, label = name.partition(".")[0], f"#{index} {name}"
        known = None if operator == _VIEW else _schema(name)
        if known is None:
            outs, given = {len(call.args) - 1}, len(call.args)
        else:
            # After the arguments of the schema come the returned values, which repeat the out arguments.
            given = len(known.arguments)
            outs = {i for i, a in enumerate(known.arguments) if a.alias_info is not None and a.alias_info.is_write}
            outs |= set(range(given, len(call.args)))
        written = list(dict.fromkeys(self._flat([call.args[i] for i in sorted(outs)])))
        read = self._flat([a for i, a in enumerate(call.args[:given]) if i not in outs])
        external = tuple(v for v in written if self._root(v) in self.inputs or self._root(v) in self.constants)
        shape_only = operator in _SHAPE_ONLY
        sizes = tuple(v for v in read if shape_only and self.plan.tensor(v) is not None)
        reads = tuple(v for v in read if v not in sizes)
        results = tuple(v for v in written if v not in external)
        aliases: tuple[tuple[Value, Value], ...] = ()
        if operator == _VIEW:
            source, result = call.args[0], call.args[-1]
            aliases = ((result, source),)
            self._roots[result] = self._root(source)
        own = _POSITIONS.get(operator)
        places = reads if own is None else tuple(call.args[i] for i in own)
        return Step(
            label=label,
            operator=operator,
            reads=reads,
            sizes=sizes,
            results=results,
            writes=external,
            positions=places if external else (),
            aliases=aliases,
            data_shaped=operator in _DATA_SHAPED,
        )

    def _root(self, value: int) -> int:
        return self._roots.get(value, value)

    def _flat(self, arguments: list[int]) -> list[int]:
        """Arguments with lists replaced by the values they hold."""
        flat: list[int] = []
        for argument in arguments:
            value = self.plan.values[argument]
            if isinstance(value, schema.TensorList | schema.OptionalTensorList | schema.IntList):
                flat += [item for item in value.items if item >= 0]
            else:
                flat.append(argument)
        return flat
