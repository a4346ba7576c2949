"""How an operator is declared: one function, named parameters as MIL names them.

A parameter is a tensor unless the declaration says otherwise. `static` ones must be constants and arrive as Python
values (int, float, bool, str, or a tuple of them); `integers` arrive as a tuple of ints when they are constant and as
an integer tensor otherwise (`ints` reads both). `multiplied` ones are matrices that a float32 product takes (see
`values`). A parameter with a default may be left out. An operator whose result may share memory with an argument says
so with `view`; every other returns memory of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Kernel = Callable[..., Any]


@dataclass(frozen=True)
class Operator:
    """One operator of the opset."""

    name: str
    kernel: Kernel
    parameters: tuple[str, ...]
    required: frozenset[str]
    static: frozenset[str]
    integers: frozenset[str]
    multiplied: frozenset[str]
    view: bool


OPERATORS: dict[str, Operator] = {}


def operator(
    *names: str, static: Sequence[str] = (), integers: Sequence[str] = (), multiplied: Sequence[str] = (),
    view: bool = False,
) -> Callable[[Kernel], Kernel]:  # fmt: skip
    """Declare the decorated function as the kernel of `names`."""

    def declare(kernel: Kernel) -> Kernel:
        parameters = inspect.signature(kernel).parameters
        required = frozenset(name for name, p in parameters.items() if p.default is inspect.Parameter.empty)
        for name in names:
            assert name not in OPERATORS, f"two kernels for {name}"
            assert {*static, *integers, *multiplied} <= parameters.keys()
            OPERATORS[name] = Operator(
                name, kernel, tuple(parameters), required, frozenset(static), frozenset(integers),
                frozenset(multiplied), view,
            )  # fmt: skip
        return kernel

    return declare


def ints(value: Sequence[int] | torch.Tensor) -> tuple[int, ...]:
    """Integers of a tuple, or of an integer tensor of rank 0 or 1."""
    if isinstance(value, torch.Tensor):
        flat = value.reshape(-1).tolist()
        return tuple(flat)
    return tuple(value)


def wide(x: torch.Tensor) -> torch.Tensor:
    """A float16 tensor in float32; any other as it is."""
    return x.float() if x.dtype == torch.float16 else x


def unsupported(what: str) -> ValueError:
    """An argument outside what the operator defines; the run turns it into a typed error that names the operator."""
    return ValueError(what)
