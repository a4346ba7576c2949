"""The integer arithmetic of a function, computed for concrete lengths: where its writes land.

Letters: Q query_len, S seq_len, C capacity of a ring.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from exporter.backends.coreml.file import Function, Operation, Package
from exporter.backends.coreml.flow import producers

Array = np.ndarray


class NotComputable(Exception):
    """A value that does not descend from lengths alone, or an operator unknown here."""


class Lengths:
    """One call: `sizes` are the shapes of the inputs."""

    def __init__(self, package: Package, function: Function, sizes: dict[str, tuple[int, ...]]) -> None:
        self.package, self.function, self.sizes = package, function, sizes
        self._made = producers(function)
        self._known: dict[str, Array] = {}

    def value(self, name: str) -> Array:
        """The integers or booleans of a value.

        Raises:
            NotComputable: it depends on the content of an input, a state or a weight.
        """
        if name not in self._known:
            self._known[name] = self._compute(name)
        return self._known[name]

    def _compute(self, name: str) -> Array:
        if name in self.function.constants:
            array = self.package.array(self.function.constants[name])
            if isinstance(array, str) or array.dtype.kind not in "bi":
                raise NotComputable(f"{name} is a constant of {self.function.types[name].dtype}")
            return array
        operation = self._made.get(name)
        if operation is None:
            raise NotComputable(f"{name} is an input's content")
        if operation.type == "shape":
            (source,) = operation.inputs["x"]
            if source not in self.sizes:
                raise NotComputable(f"{name} is the shape of {source}")
            return np.array(self.sizes[source], np.int32)
        kernel = _KERNELS.get(operation.type)
        if kernel is None:
            raise NotComputable(f"{name} is made by {operation.type}")
        return np.asarray(kernel(self, operation))

    def one(self, operation: Operation, parameter: str) -> Array:
        name = operation.one(parameter)
        if name is None:
            raise NotComputable(f"{operation.name} lacks {parameter}")
        return self.value(name)


def _binary(function: Callable[[Array, Array], Array]) -> Callable[[Lengths, Operation], Any]:
    return lambda lengths, operation: function(lengths.one(operation, "x"), lengths.one(operation, "y"))


def _slice(lengths: Lengths, operation: Operation) -> Any:
    x, begin, end = (lengths.one(operation, name) for name in ("x", "begin", "end"))
    masks = {
        name: lengths.one(operation, name) if operation.one(name) else np.zeros(x.ndim, bool)
        for name in ("begin_mask", "end_mask", "squeeze_mask")
    }
    index = tuple(
        int(begin[axis]) if masks["squeeze_mask"][axis] else
        slice(None if masks["begin_mask"][axis] else int(begin[axis]),
              None if masks["end_mask"][axis] else int(end[axis]))
        for axis in range(x.ndim)
    )  # fmt: skip
    return x[index]


_KERNELS: dict[str, Callable[[Lengths, Operation], Any]] = {
    "add": _binary(np.add),
    "sub": _binary(np.subtract),
    "mul": _binary(np.multiply),
    "mod": _binary(np.mod),
    "floor_div": _binary(np.floor_divide),
    "minimum": _binary(np.minimum),
    "maximum": _binary(np.maximum),
    "greater_equal": _binary(np.greater_equal),
    "less": _binary(np.less),
    "less_equal": _binary(np.less_equal),
    "logical_and": _binary(np.logical_and),
    "gather": lambda own, op: own.one(op, "x")[own.one(op, "indices")],
    "concat": lambda own, op: np.concatenate([np.atleast_1d(own.value(name)) for name in op.inputs["values"]]),
    "range_1d": lambda own, op: np.arange(*(int(own.one(op, n)) for n in ("start", "end", "step")), dtype=np.int32),
    "select": lambda own, op: np.where(own.one(op, "cond"), own.one(op, "a"), own.one(op, "b")),
    "expand_dims": lambda own, op: np.expand_dims(own.one(op, "x"), tuple(own.one(op, "axes").tolist())),
    "squeeze": lambda own, op: np.squeeze(own.one(op, "x")),
    "slice_by_index": _slice,
    "identity": lambda own, op: own.one(op, "x"),
}
