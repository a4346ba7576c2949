"""A function of a program as plain records: operations in order, each with its inputs, outputs and declared types.

What cannot be run is refused here, when the package is loaded: an operator without a kernel, an input that its operator
does not have, a parameter that must be a constant and is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from exporter.backends.coreml.evaluator.operators import CONSTEXPR, OPERATORS
from exporter.backends.coreml.evaluator.package import OPSET, Package, TensorType, tensor_type
from exporter.backends.coreml.evaluator.values import Constant, ConstantStore

Reference = str | Constant
"""A value by its name, or a constant."""

LISTS = frozenset({"values"})
"""Parameters that take several tensors."""


@dataclass(frozen=True)
class Operation:
    """One operation. `inputs` maps a parameter to what it takes: one reference, or several for `LISTS`."""

    type: str
    inputs: dict[str, tuple[Reference, ...]]
    outputs: tuple[str, ...]
    declared: tuple[TensorType | None, ...]

    def one(self, parameter: str) -> Reference:
        (reference,) = self.inputs[parameter]
        return reference

    def names(self) -> Iterator[str]:
        """The values that are read, constants left out."""
        for references in self.inputs.values():
            yield from (reference for reference in references if isinstance(reference, str))


@dataclass(frozen=True)
class FunctionText:
    """One function: inputs and states with their declared types, operations, and the names of its results."""

    name: str
    inputs: dict[str, TensorType]
    states: dict[str, TensorType]
    operations: tuple[Operation, ...]
    outputs: tuple[str, ...]


def read_function(package: Package, name: str, store: ConstantStore) -> FunctionText:
    """Read function `name` of `package`; its constants go to `store`.

    Raises:
        BundleError: the function holds something that cannot be evaluated.
    """
    return _Reader(package, name, store).read()


class _Reader:
    def __init__(self, package: Package, name: str, store: ConstantStore) -> None:
        self.package, self.name, self.store = package, name, store
        self.constants: dict[str, Constant] = {}
        self.known: set[str] = set()

    def read(self) -> FunctionText:
        function = self.package.functions[self.name]
        block = function.block_specializations[OPSET]
        inputs: dict[str, TensorType] = {}
        states: dict[str, TensorType] = {}
        for value in function.inputs:
            declared = tensor_type(value.type)
            if declared is None:
                raise self._error(f"input {value.name} of a type that is no tensor", "tensors and states")
            (states if value.type.WhichOneof("type") == "stateType" else inputs)[value.name] = declared
            self.known.add(value.name)
        for name, state in states.items():
            if state.shape is None or None in state.shape:
                raise self._error(f"state {name} of shape {state}", "a shape known beforehand, which states must have")
        operations = [operation for message in block.operations for operation in self._operations(message)]
        for name in block.outputs:
            self._reference(name, "the function's results")
        return FunctionText(self.name, inputs, states, tuple(operations), tuple(block.outputs))

    def _operations(self, message: Any) -> list[Operation]:
        """No record for a constant, one for an operation, two for an update of a state."""
        outputs = tuple(output.name for output in message.outputs)
        label = outputs[0] if outputs else message.type
        declared = tuple(tensor_type(output.type) for output in message.outputs)
        if message.type == "const":
            self.constants[label] = self.store.literal(message.attributes["val"], f"constant {label}")
            return []
        inputs = {
            parameter: tuple(self._argument(binding, label) for binding in argument.arguments)
            for parameter, argument in message.inputs.items()
        }
        operation = Operation(message.type, inputs, outputs, declared)
        if message.type in CONSTEXPR:
            self.constants[label] = self._compressed(operation, label)
            return []
        self.known.update(outputs)
        match message.type:
            case "read_state" | "write_state":
                return [operation]
            case "coreml_update_state":  # write, then read back
                written = {"input": inputs["state"], "data": inputs["value"]}
                return [
                    Operation("write_state", written, (), ()),
                    Operation("read_state", {"input": inputs["state"]}, outputs, declared),
                ]
        self._check(operation, label, bool(message.blocks))
        return [operation]

    def _check(self, operation: Operation, label: str, has_blocks: bool) -> None:
        operator = OPERATORS.get(operation.type)
        if operator is None or has_blocks:
            raise self._error(
                f"operator {operation.type} (output {label})",
                f"one of the {len(OPERATORS) + len(CONSTEXPR)} operators that the evaluator has kernels for",
                "Convert the model without it, or add its kernel under exporter/backends/coreml/evaluator/operators.",
            )
        what = f"operator {operation.type} (output {label})"
        # `in_place` is a parameter of ours: see `states`.
        unknown = operation.inputs.keys() - (set(operator.parameters) - {"in_place"})
        if unknown:
            raise self._error(f"{what} with inputs {sorted(unknown)}", f"inputs among {list(operator.parameters)}")
        missing = operator.required - operation.inputs.keys()
        if missing:
            raise self._error(f"{what} without {sorted(missing)}", "every input that has no default")
        for parameter, references in operation.inputs.items():
            if parameter not in LISTS and len(references) != 1:
                raise self._error(f"{what} with {len(references)} values for {parameter}", "one")
            constant = all(isinstance(reference, Constant) for reference in references)
            if parameter in operator.static and not constant:
                raise self._error(f"{what} whose {parameter} is computed", f"{parameter} to be a constant")

    def _compressed(self, operation: Operation, label: str) -> Constant:
        inputs = {}
        for parameter in operation.inputs:
            reference = operation.one(parameter)
            if not isinstance(reference, Constant):
                raise self._error(f"{operation.type} {label} whose {parameter} is computed", "constants only")
            inputs[parameter] = reference
        (declared,) = operation.declared
        if declared is None:
            raise self._error(f"{operation.type} {label} of a type that is no tensor", "a tensor")
        return self.store.unpacked(operation.type, inputs, declared)

    def _argument(self, binding: Any, label: str) -> Reference:
        if binding.WhichOneof("binding") == "value":
            return self.store.literal(binding.value, f"an input of {label}")
        return self._reference(binding.name, label)

    def _reference(self, name: str, label: str) -> Reference:
        if name in self.constants:
            return self.constants[name]
        if name not in self.known:
            raise self._error(f"{label} reading {name}, which nothing before it makes", "operations in order")
        return name

    def _error(self, got: str, expected: str, repair: str = "Export the package again.") -> Exception:
        return self.package.error(got=f"function {self.name}: {got}", expected=expected, repair=repair)


def last_uses(operations: Sequence[Operation], outputs: Sequence[str]) -> dict[str, int]:
    """The place of the last operation that reads each value; one past the end for results."""
    uses: dict[str, int] = {}
    for place, operation in enumerate(operations):
        uses |= dict.fromkeys(operation.names(), place)
    return uses | dict.fromkeys(outputs, len(operations))
