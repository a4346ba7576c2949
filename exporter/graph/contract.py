"""What the graph checks hold a program to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from exporter.backends import formats, traits
from exporter.errors import GraphContractError
from exporter.spec import CheckResult, MethodSpec, StateSpec
from exporter.spec.checks import TRACED_CHECKS

# Measured with XNNPACK in ExecuTorch 1.5.1, prefill and main: Gemma 3 270M in int8 89% and 95%; the lowest of the
# tests' models, the tiny Gemma over int8 caches with slack in its rings, 67% and 73%.
MIN_DELEGATED_SHARE = {"prefill": 0.65, "main": 0.65}
"""The floor, by method, under which a lowering is refused: it no longer delegates what it did."""
# An int8 cache rounds rows and queries, and where the operator does not read them decodes rows, outside delegates.
INT8_CACHE_SHARE = 0.1
"""What an int8 cache takes off that floor."""


def delegated_floor(method: str, states: Sequence[StateSpec]) -> float | None:
    """The floor of a method over `states`; None for a method of which nothing was measured."""
    floor = MIN_DELEGATED_SHARE.get(method)
    if floor is None:
        return None
    return floor - (INT8_CACHE_SHARE if any(state.dtype == "int8" for state in states) else 0.0)


def known_checks() -> frozenset[str]:
    """The names of all checks, of traced programs and of the files of every format."""
    return frozenset({*TRACED_CHECKS, *(name for format in formats() for name in traits(format).checks)})


@dataclass(frozen=True)
class FileLimits:
    """What holds for a program file as a whole.

    Args:
        max_duplicate_share: repeated bytes over unique ones stay below it.
        max_file_bytes: the largest file; None reports its size only.
    """

    max_duplicate_share: float = 0.05
    max_file_bytes: int | None = None


DEFAULT_LIMITS = FileLimits()


@dataclass(frozen=True)
class ProgramContract:
    """One method's promises.

    Inputs are ``input_ids [1, Q]``, ``position_ids [1, S]`` and `states` in order; the tokens before this call are
    S - Q, from shapes.

    Args:
        method: the method's name in the program file.
        interface: its inputs, outputs and the inclusive ranges of its dynamic dimensions.
        states: the tensors it mutates.
        min_delegated_share: the least share of operators that must run inside delegates; None reports it only.
        max_planned_bytes: the most memory the method may plan for activations and outputs; None reports it only.
    """

    method: str
    interface: MethodSpec
    states: tuple[StateSpec, ...]
    min_delegated_share: float | None = None
    max_planned_bytes: int | None = None

    def __post_init__(self) -> None:
        got = tuple(t.name for t in self.interface.inputs[2:])
        assert got == tuple(s.name for s in self.states), f"inputs {got} are not the states"
        assert set(self.interface.mutates) == set(got), f"{self.interface.mutates} is not every state"

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(tensor.name for tensor in self.interface.inputs)

    @property
    def write_first(self) -> bool:
        return self.interface.write_first

    @property
    def query(self) -> tuple[int, int]:
        """The inclusive range of Q."""
        return self.range_of(self.interface.inputs[0].shape[1])

    @property
    def sequence(self) -> tuple[int, int]:
        """The inclusive range of S."""
        return self.range_of(self.interface.inputs[1].shape[1])

    @property
    def last_token_only(self) -> bool:
        """Whether logits of all Q tokens are forbidden."""
        return self.interface.logits == "last"

    @property
    def vocab_size(self) -> int:
        return self.range_of(self.interface.outputs[0].shape[-1])[1]

    def range_of(self, dimension: int | str) -> tuple[int, int]:
        """The inclusive range of one entry of a tensor's shape."""
        return self.interface.dims[dimension] if isinstance(dimension, str) else (dimension, dimension)

    def of_kind(self, kind: str) -> tuple[StateSpec, ...]:
        return tuple(state for state in self.states if state.kind == kind)

    @property
    def positional(self) -> dict[str, StateSpec]:
        """The states whose rows belong to positions, by name."""
        return {state.name: state for state in self.states if state.cache_kind.positional}

    def result(self, name: str, problems: list[str], evidence: str) -> CheckResult:
        """A check's result: passed if there are no `problems`, which are the evidence otherwise."""
        assert name in known_checks(), f"{name} is not listed"
        return CheckResult(
            name=name, program=self.method, passed=not problems, evidence=summary(problems) if problems else evidence
        )


def summary(items: list[str], most: int = 6) -> str:
    """The first `most` items and the number of all."""
    more = f"; and {len(items) - most} more" if len(items) > most else ""
    return "; ".join(items[:most]) + more


def refuse_failed(results: list[CheckResult]) -> None:
    """Refuse a program of which a check failed.

    Raises:
        GraphContractError: names every failed check with its evidence.
    """
    failed = [r for r in results if not r.passed]
    if failed:
        raise GraphContractError(
            "graph contract",
            got="; ".join(f"{r.program}: {r.name} failed ({r.evidence})" for r in failed),
            expected=f"{len(results)} of {len(results)} checks to pass",
            repair="A program that lacks these properties generates wrong text or crashes: it must not ship.",
        )
