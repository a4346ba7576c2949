"""What the graph checks hold a program to."""

from __future__ import annotations

from dataclasses import dataclass

from exporter.backends import formats, traits
from exporter.errors import GraphContractError
from exporter.spec import CheckResult, MethodSpec, StateSpec
from exporter.spec.checks import TRACED_CHECKS

COST_CHECKS = frozenset({"delegated_share", "planned_bytes", "weights_stored_once", "file_bytes"})
"""Those of what a program costs: one that fails them is slow or large, and right."""

EXPECTED_DELEGATED_SHARE = 0.5
"""A method that runs less than this share of its operators inside delegates is worth a warning; what a shape of model
delegates is recorded where regressions are guarded, in the tests."""


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
        min_delegated_share: the least share of operators that must run inside delegates; None warns below
            `EXPECTED_DELEGATED_SHARE`.
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

    def result(self, name: str, problems: list[str], evidence: str, demanded: bool = True) -> CheckResult:
        """A check's outcome: it passed when there are no `problems`, which otherwise are the evidence, and only a
        warning where nobody `demanded` that there be none."""
        assert name in known_checks(), f"{name} is not listed"
        return CheckResult(
            name=name,
            program=self.method,
            passed=not problems,
            evidence=summary(problems) if problems else evidence,
            severity="error" if demanded else "warning",
        )


def summary(items: list[str], most: int = 6) -> str:
    """The first `most` items and the number of all."""
    more = f"; and {len(items) - most} more" if len(items) > most else ""
    return "; ".join(items[:most]) + more


def refuse_failed(results: list[CheckResult]) -> None:
    """Refuse a program of which a check failed; warnings pass.

    Raises:
        GraphContractError: names every failed check with its evidence.
    """
    failed = [r for r in results if r.refused]
    if failed:
        costs = all(r.name in COST_CHECKS for r in failed)
        raise GraphContractError(
            "graph contract",
            got="; ".join(f"{r.program}: {r.name} failed ({r.evidence})" for r in failed),
            expected=f"{len(results)} of {len(results)} checks to pass",
            repair="The program is right and costs more than its contract allows."
            if costs
            else "A program that lacks these properties generates wrong text or crashes: it must not ship.",
        )
