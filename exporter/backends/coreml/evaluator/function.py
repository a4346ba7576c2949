"""One function of a package, linked into steps that run one after the other.

A step is a kernel with its constants bound, the slots of its arguments and results, and the slots that no later step
reads, which are then emptied. The result of a step is compared with the type that the program declares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from exporter.backends.coreml.evaluator.dtypes import STRING
from exporter.backends.coreml.evaluator.operators import OPERATORS
from exporter.backends.coreml.evaluator.package import Feature, Package, TensorType
from exporter.backends.coreml.evaluator.program_text import LISTS, FunctionText, Operation, last_uses
from exporter.backends.coreml.evaluator.states import plan
from exporter.backends.coreml.evaluator.values import Constant, ConstantStore
from exporter.errors import RuntimeLimitError

Tensor = torch.Tensor


@dataclass(frozen=True)
class Step:
    """`outputs` pairs a slot with the dtype and shape declared for it; `single` arguments come from one slot."""

    operation: Operation
    kernel: Callable[..., Any]
    single: tuple[tuple[str, int], ...]
    lists: tuple[tuple[str, tuple[Any, ...]], ...]
    outputs: tuple[tuple[int, torch.dtype, tuple[int | None, ...] | None], ...]
    free: tuple[int, ...]


class Function:
    """A function that can be called.

    Args:
        package: its package, named in errors.
        text: its operations.
        store: its constants, shared with the other functions; every `multiplied` constant is widened already.
    """

    def __init__(self, package: Package, text: FunctionText, store: ConstantStore) -> None:
        self.package, self.text, self.store = package, text, store
        self.features = self._features()
        self.slots: dict[str, int] = {}
        for name in (*text.inputs, *text.states):
            self._slot(name)
        self.steps = self._link()

    def run(self, inputs: Mapping[str, Tensor], states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the function; `states` are written in place. Returns results by name, in memory of their own.

        Raises:
            RuntimeLimitError: an input or a state that is not as declared. Nothing was written.
            BundleError: an operator met values that its definition does not cover. States may be half written.
        """
        self._check(inputs, states)
        values: list[Any] = [None] * len(self.slots)
        for name, tensor in (*inputs.items(), *states.items()):
            values[self.slots[name]] = tensor
        with torch.no_grad():
            for step in self.steps:
                arguments = {name: values[slot] for name, slot in step.single}
                for name, parts in step.lists:
                    arguments[name] = tuple([values[p] if isinstance(p, int) else p for p in parts])
                try:
                    result = step.kernel(**arguments)
                except (ValueError, RuntimeError, IndexError, ZeroDivisionError) as error:
                    raise self._fault(step, str(error)) from error
                if not isinstance(result, tuple):
                    result = (result,)
                if len(result) != len(step.outputs):
                    raise self._fault(step, f"{len(result)} results")
                for (slot, dtype, shape), tensor in zip(step.outputs, result, strict=True):
                    if tensor.dtype != dtype or not _fits(tensor.shape, shape):
                        raise self._fault(step, f"a result {tensor.dtype} {list(tensor.shape)}")
                    values[slot] = tensor
                for slot in step.free:
                    values[slot] = None
            # A result may share memory with a state or an input.
            return {name: values[self.slots[name]].clone() for name in self.text.outputs}

    def _check(self, inputs: Mapping[str, Tensor], states: Mapping[str, Tensor]) -> None:
        owner = f"{self.package.path.name}, function {self.text.name}"
        for kind, given, declared in (("input", inputs, self.text.inputs), ("state", states, self.text.states)):
            if given.keys() != declared.keys():
                raise RuntimeLimitError(
                    owner,
                    got=f"{kind}s {sorted(given)}",
                    expected=f"{sorted(declared)}",
                    repair=f"Hand over exactly the {kind}s that the package declares.",
                )
            for name, tensor in given.items():
                if tensor.dtype != declared[name].element.carrier or not _fits(tensor.shape, declared[name].shape):
                    raise RuntimeLimitError(
                        owner,
                        got=f"{kind} {name} {tensor.dtype} {list(tensor.shape)}",
                        expected=f"{declared[name]}",
                        repair=f"Allocate the {kind} as the package declares it.",
                    )
        for name, feature in self.features.items():
            feature.check(owner, tuple(inputs[name].shape))

    def _features(self) -> dict[str, Feature]:
        features = self.package.features(self.text.name)
        if features.keys() != self.text.inputs.keys():
            raise self.package.error(
                got=f"function {self.text.name} with inputs {sorted(self.text.inputs)}",
                expected=f"the inputs that the model describes, {sorted(features)}",
            )
        return features

    def _link(self) -> list[Step]:
        """Every operation that has work to do, as a step."""
        operations = self.text.operations
        sharing = plan(operations, self.text.outputs)
        uses = last_uses(operations, self.text.outputs)
        kept = {self.slots[name] for name in self.text.states}
        steps = []
        for place, operation in enumerate(operations):
            if place in sharing.done_writes:
                continue
            if operation.type == "read_state":
                kernel: Callable[..., Any] = _copy if place in sharing.copied_reads else _share
                bound: dict[str, Any] = {}
            elif operation.type == "write_state":
                kernel, bound = _write, {}
            else:
                kernel, bound = self._bind(operation)
                if place in sharing.in_place:
                    bound["in_place"] = True
            single = tuple(
                (parameter, self._slot(reference))
                for parameter, (reference, *_) in operation.inputs.items()
                if parameter not in LISTS and isinstance(reference, str)
            )
            lists = tuple(
                (parameter, tuple(self._slot(r) if isinstance(r, str) else self.store.narrow(r) for r in references))
                for parameter, references in operation.inputs.items()
                if parameter in LISTS
            )
            dead = [name for name in operation.names() if uses[name] == place]
            dead += [name for name in operation.outputs if name not in uses]
            outputs = tuple(
                (self._slot(name), *self._declared(operation, declared))
                for name, declared in zip(operation.outputs, operation.declared, strict=True)
            )
            free = tuple({self._slot(name) for name in dead} - kept)
            steps.append(Step(operation, partial(kernel, **bound) if bound else kernel, single, lists, outputs, free))
        return steps

    def _bind(self, operation: Operation) -> tuple[Callable[..., Any], dict[str, Any]]:
        """The kernel, and the arguments that are constants."""
        operator = OPERATORS[operation.type]
        kernel = operator.kernel
        bound = {}
        for parameter, references in operation.inputs.items():
            reference = references[0] if references else None
            if parameter in LISTS or not isinstance(reference, Constant):
                continue
            if parameter in operator.static or parameter in operator.integers:
                bound[parameter] = python_value(reference)
                continue
            if parameter in operator.multiplied:
                bound[parameter] = self.store.tensor(reference)
            elif operation.type == "gather" and parameter == "x" and self.store.is_wide(reference):
                bound[parameter] = self.store.tensor(reference)
                kernel = _narrowed(kernel)  # only the rows that were taken
            else:
                bound[parameter] = self.store.narrow(reference)
        return kernel, bound

    def _declared(
        self, operation: Operation, declared: TensorType | None
    ) -> tuple[torch.dtype, tuple[int | None, ...] | None]:
        if declared is None or declared.element is STRING:
            raise self.package.error(
                got=f"function {self.text.name}: {operation.type} {operation.outputs} without a tensor type",
                expected="a tensor type for every value",
            )
        return declared.element.carrier, declared.shape

    def _slot(self, name: str) -> int:
        return self.slots.setdefault(name, len(self.slots))

    def _fault(self, step: Step, what: str) -> Exception:
        operation = step.operation
        types = ", ".join(str(declared) for declared in operation.declared)
        return self.package.error(
            got=f"function {self.text.name}, operator {operation.type} (output {', '.join(operation.outputs)}): {what}",
            expected=f"what its definition covers, with a result {types}",
            repair="Export the package again; if it comes back, the conversion is wrong here.",
        )


def python_value(constant: Constant) -> Any:
    """A constant as a Python number, bool or string, or a tuple of them."""
    value = constant.value()
    if isinstance(value, str):
        return value
    return tuple(value.tolist()) if value.dim() else value.item()


def _fits(shape: Sequence[int], declared: Sequence[int | None] | None) -> bool:
    if declared is None:
        return True
    return len(shape) == len(declared) and all(d is None or n == d for n, d in zip(shape, declared, strict=True))


def _narrowed(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda **arguments: kernel(**arguments).half()


def _share(input: Tensor) -> Tensor:
    return input


def _copy(input: Tensor) -> Tensor:
    return input.clone()


def _write(input: Tensor, data: Tensor) -> tuple[()]:
    # The data may be a view of the state itself.
    input.copy_(data.clone() if data.untyped_storage().data_ptr() == input.untyped_storage().data_ptr() else data)
    return ()
