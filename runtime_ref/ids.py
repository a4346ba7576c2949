"""Token ids as callers have them: lists, NumPy arrays, tensors; never fractions, never booleans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from operator import index
from typing import Any

import numpy as np
import torch

from exporter.errors import RuntimeLimitError


def whole(value: Any, what: str) -> int:
    """`value` as an int: a Python, NumPy or torch integer.

    Args:
        what: its name in the error.

    Raises:
        RuntimeLimitError: it is a fraction, a boolean, a text or several numbers.
    """
    is_bool = isinstance(value, (bool, np.bool_)) or getattr(value, "dtype", None) in (torch.bool, np.dtype(bool))
    is_several = getattr(value, "ndim", 0) != 0
    if not is_bool and not is_several:
        try:
            return index(value)
        except TypeError:
            pass
    raise RuntimeLimitError(what, got=_shown(value), expected="a whole number", repair="Give an integer.")


def token_ids(ids: Any) -> list[int]:
    """`ids` as a list of ints: any sequence of integers, of one axis.

    Raises:
        RuntimeLimitError: it is no sequence, has another number of axes, or an item is no integer.
    """
    axes = getattr(ids, "ndim", 1)
    if axes != 1 or isinstance(ids, (str, bytes, bytearray, Mapping, Set)) or not isinstance(ids, Iterable):
        got = f"{axes} axes" if axes != 1 else f"{_shown(ids)}"
        raise RuntimeLimitError(
            "session", got=got, expected="a sequence of token ids of one axis", repair="Give one conversation: ids[0]."
        )
    if isinstance(ids, (list, tuple)) and all(type(token) is int for token in ids):
        return list(ids)
    if isinstance(ids, (np.ndarray, torch.Tensor)):
        if not len(ids):
            return []
        whole(ids[0], "token id")  # the type of all
        return [int(token) for token in ids.tolist()]
    return [whole(token, "token id") for token in ids]


def _shown(value: Any) -> str:
    return f"{value!r}"[:80] + f" ({type(value).__name__})"
