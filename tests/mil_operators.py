"""Call one kernel of the package evaluator, and hold it against numpy arrays that a slow oracle made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from exporter.backends.coreml.evaluator.operators import OPERATORS

FLOATS = ("float16", "float32")


def randoms(shape: Sequence[int], dtype: str = "float32", seed: int = 0, scale: float = 2.0) -> np.ndarray:
    """Normal numbers of `dtype`; integers of -9 .. 9 for an integer type."""
    generator = np.random.default_rng(seed)
    if np.dtype(dtype).kind in "iu":
        low = -9 if np.dtype(dtype).kind == "i" else 0
        return generator.integers(low, 10, shape).astype(dtype)
    return (generator.standard_normal(shape) * scale).astype(dtype)


def call(name: str, **arguments: Any) -> Any:
    """Run operator `name`: arrays become tensors, `static` parameters stay Python values. Returns arrays.

    An operator that is not declared a view must not hand out its arguments' memory: the sharing of states rests on it.
    """
    operator = OPERATORS[name]
    given = {
        key: value if key in operator.static else _tensor(value)
        for key, value in arguments.items()
        if value is not None
    }
    assert operator.required <= given.keys() <= set(operator.parameters)
    result = operator.kernel(**given)
    parts = result if isinstance(result, tuple) else (result,)
    if not operator.view:
        own = {_address(value) for value in given.values() if isinstance(value, torch.Tensor) and value.numel()}
        assert not own & {_address(part) for part in parts}, f"{name} returns its argument's memory"
    arrays = tuple(part.numpy() for part in parts)
    return arrays if isinstance(result, tuple) else arrays[0]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return torch.from_numpy(np.array(value))
    if isinstance(value, tuple | list) and value and isinstance(value[0], np.ndarray):
        return tuple(torch.from_numpy(part.copy()) for part in value)
    return value


def same(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Equal to the bit, type and shape included; NaN equals NaN."""
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    np.testing.assert_array_equal(ours, theirs)


def close(ours: np.ndarray, exact: np.ndarray, dtype: str, ulps: float = 1.0) -> None:
    """`ours`, of `dtype`, within `ulps` units in the last place of the float64 `exact`.

    In float16 that is: the exact value rounded, or its neighbour where the float32 inside fell on the other side.
    """
    assert ours.dtype == np.dtype(dtype) and ours.shape == exact.shape
    rounded = exact.astype(dtype)
    np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(rounded))
    finite = np.isfinite(rounded)
    step = np.spacing(np.abs(rounded[finite])).astype(np.float64)
    error = np.abs(ours[finite].astype(np.float64) - exact[finite])
    assert (error <= ulps * step).all(), f"{(error / step).max():.2f} units in the last place"
    np.testing.assert_array_equal(ours[~finite], rounded[~finite])
