"""The integers of a function, computed for concrete lengths, and rows followed through the operations that move them.

Written in numpy from the definitions of the operators that compute indices, independent of the interpreter.

Letters: Q query_len, C capacity, K KV heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from exporter.backends.coreai.file import Function, Operation
from exporter.graph.index_proof import NotPlayable

_BINARY: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "modulo": np.mod, "floor_divide": np.floor_divide,
    "greater": np.greater, "greater_equal": np.greater_equal, "less": np.less, "less_equal": np.less_equal,
    "equal": np.equal, "not_equal": np.not_equal, "and": np.logical_and, "or": np.logical_or,
    "maximum": np.maximum, "minimum": np.minimum,
}  # fmt: skip


class Values:
    """Computes values of `function`.

    Args:
        function: the function.
        shapes: the concrete shape of every input and state, by name.
        given: values that are known beforehand.
    """

    def __init__(
        self, function: Function, shapes: Mapping[str, tuple[int, ...]], given: Mapping[int, np.ndarray] | None = None
    ) -> None:
        self.function = function
        self.memo: dict[int, np.ndarray] = dict(given or {})
        arguments = (*function.inputs, *function.states)
        self.shapes = {argument.value: shapes[argument.name] for argument in arguments}

    def __call__(self, value: int) -> np.ndarray:
        """The content of `value`.

        Raises:
            NotPlayable: it depends on the content of an input, or on an operator that is not known here.
        """
        if value not in self.memo:
            operation = self.function.producers.get(value)
            if operation is None:
                raise NotPlayable(f"value {value} is the content of an input")
            if operation.constant is not None:
                self.memo[value] = operation.constant
            elif operation.name == "coreai.get_shape":
                self.memo[value] = np.array(self.shape(operation.operands[0]), dtype=np.int64)
            else:
                self.memo[value] = self._apply(operation)
        return self.memo[value]

    def shape(self, value: int) -> tuple[int, ...]:
        """The concrete shape of `value`."""
        if value in self.shapes:
            return self.shapes[value]
        producer = self.function.producers.get(value)
        if producer is not None and producer.name in ("coreai.read_handle", "coreai.slice_update"):
            return self.shape(producer.operands[0])
        kind = self.function.types.get(value)
        if kind is not None and None not in kind.shape:
            return tuple(n for n in kind.shape if n is not None)
        return self(value).shape

    def _apply(self, operation: Operation) -> np.ndarray:
        name = operation.name.rpartition(".")[2].removeprefix("broadcasting_")
        own = getattr(self, f"_{name}", None)
        if name not in _BINARY and own is None:
            raise NotPlayable(f"{operation.name} is not among the operators of an index")
        operands = [self(value) for value in operation.operands]
        result = _BINARY[name](*operands) if name in _BINARY else own(*operands)  # type: ignore[misc]
        kind = self.function.types[operation.results[0]]
        if name == "cast" and kind.is_integer:
            result = np.asarray(result).astype(np.int64)
        return np.asarray(result)

    def _cast(self, x: np.ndarray) -> np.ndarray:
        return x

    def _not(self, x: np.ndarray) -> np.ndarray:
        return np.logical_not(x)

    def _where(self, condition: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.where(condition, x, y)

    def _concat(self, axis: np.ndarray, *parts: np.ndarray) -> np.ndarray:
        return np.concatenate([np.atleast_1d(part) for part in parts], int(axis))

    def _reshape(self, x: np.ndarray, shape: np.ndarray) -> np.ndarray:
        return x.reshape([int(n) for n in shape])

    def _range(self, start: np.ndarray, stop: np.ndarray, step: np.ndarray) -> np.ndarray:
        return np.arange(int(start), int(stop), int(step))

    def _expand_dims(self, x: np.ndarray, axes: np.ndarray) -> np.ndarray:
        return np.expand_dims(x, tuple(int(axis) for axis in axes))

    def _transpose(self, x: np.ndarray, order: np.ndarray) -> np.ndarray:
        return x.transpose([int(axis) for axis in order])

    def _broadcast_to(self, x: np.ndarray, shape: np.ndarray) -> np.ndarray:
        return np.broadcast_to(x, [int(n) for n in shape])

    def _broadcast_in_dims(self, x: np.ndarray, sizes: np.ndarray, axes: np.ndarray) -> np.ndarray:
        shape = list(x.shape)
        for axis, size in zip(axes, sizes, strict=True):
            shape[int(axis)] = int(size)
        return np.broadcast_to(x, shape)

    def _gather_along_axis(self, x: np.ndarray, indices: np.ndarray, axis: np.ndarray) -> np.ndarray:
        return np.take_along_axis(x, indices.astype(np.int64), int(axis))

    def _slice(self, x: np.ndarray, start: np.ndarray, end: np.ndarray, strides: np.ndarray) -> np.ndarray:
        return x[region(x.shape, start, end, strides)]


def region(
    shape: tuple[int, ...], start: np.ndarray, end: np.ndarray, strides: np.ndarray | None = None
) -> tuple[slice, ...]:
    """The part of a tensor that a slice or an update touches; a negative bound counts from the end, as in numpy."""
    steps = np.ones(len(shape), dtype=np.int64) if strides is None else strides
    bounds = zip(start.tolist(), end.tolist(), steps.tolist(), strict=True)
    return tuple(slice(first, last, step) for first, last, step in bounds)
