"""What a `.pte` says of itself. Its values have no names, and a state looks like any other input."""

from __future__ import annotations

from collections import Counter

from executorch.exir.schema import TensorShapeDynamism

from exporter.backends.executorch.file import Plan, PteBytes
from exporter.backends.executorch.traits import TRAITS
from exporter.describe import FileDescription, FunctionDescription, Row


def describe(file: PteBytes) -> FileDescription:
    """See `DescriptionModule.describe`; segments may share bytes of the file, so constants and named weights together
    may exceed it."""
    parsed = file.parsed
    return FileDescription(
        file=file.name,
        format=TRAITS.name,
        functions=tuple(_function(plan) for plan in parsed.plans.values()),
        weight_bytes={"constants": parsed.constant_bytes, "named, of delegates": parsed.named_bytes},
        file_bytes=parsed.size,
    )


def _function(plan: Plan) -> FunctionDescription:
    calls = Counter(plan.operators[call.op_index] for call in plan.kernel_calls)
    calls.update(plan.delegates[call.delegate_index].backend for call in plan.delegate_calls)
    return FunctionDescription(
        name=plan.name,
        inputs=tuple(_row(plan, f"input {place}", value) for place, value in enumerate(plan.inputs)),
        states=(),
        outputs=tuple(_row(plan, f"output {place}", value) for place, value in enumerate(plan.outputs)),
        operators=dict(sorted(calls.items())),
        planned_bytes=plan.planned_bytes,
    )


def _row(plan: Plan, name: str, value: int) -> Row:
    """The sizes of a resizable tensor are its largest."""
    tensor = plan.tensor(value)
    if tensor is None:
        return name, "", ""
    most = "" if tensor.shape_dynamism == TensorShapeDynamism.STATIC else "up to "
    return name, tensor.scalar_type.name.lower(), f"{most}{list(tensor.sizes)}"
