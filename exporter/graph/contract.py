"""What the graph checks hold a program to."""

from __future__ import annotations

from dataclasses import dataclass

from exporter.errors import GraphContractError
from exporter.spec import CheckResult, MethodSpec, StateSpec


@dataclass(frozen=True)
class ProgramContract:
    """One method's promises.

    Inputs are ``input_ids [1, Q]``, ``position_ids [1, S]`` and `states` in order; the tokens before this call are
    S - Q, from shapes. A method whose Q is fixed at 1 writes rings before it reads them, every other one afterwards.

    Args:
        method: the method's name in the program file.
        interface: its inputs, outputs and the inclusive ranges of its dynamic dimensions.
        states: the tensors it mutates.
        last_token_only: whether logits of all Q tokens are forbidden.
        min_delegated_share: the least share of operators that must run inside delegates; None reports it only.
    """

    method: str
    interface: MethodSpec
    states: tuple[StateSpec, ...]
    last_token_only: bool = True
    min_delegated_share: float | None = None

    def __post_init__(self) -> None:
        got = tuple(t.name for t in self.interface.inputs[2:])
        assert got == tuple(s.name for s in self.states), f"inputs {got} are not the states"
        assert set(self.interface.mutates) == set(got), f"{self.interface.mutates} is not every state"

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(tensor.name for tensor in self.interface.inputs)

    @property
    def write_first(self) -> bool:
        return self.query == (1, 1)

    @property
    def query(self) -> tuple[int, int]:
        """The inclusive range of Q."""
        return self.range_of(self.interface.inputs[0].shape[1])

    @property
    def sequence(self) -> tuple[int, int]:
        """The inclusive range of S."""
        return self.range_of(self.interface.inputs[1].shape[1])

    @property
    def vocab_size(self) -> int:
        return self.range_of(self.interface.outputs[0].shape[-1])[1]

    def range_of(self, dimension: int | str) -> tuple[int, int]:
        """The inclusive range of one entry of a tensor's shape."""
        return self.interface.dims[dimension] if isinstance(dimension, str) else (dimension, dimension)

    def of_kind(self, kind: str) -> tuple[StateSpec, ...]:
        return tuple(state for state in self.states if state.kind == kind)

    def result(self, name: str, problems: list[str], evidence: str) -> CheckResult:
        """A check's outcome: it passed when there are no `problems`, which otherwise are the evidence."""
        return CheckResult(
            name=name, program=self.method, passed=not problems, evidence=summary(problems) if problems else evidence
        )


def summary(items: list[str], most: int = 6) -> str:
    """The first `most` items and how many there were."""
    more = f"; and {len(items) - most} more" if len(items) > most else ""
    return "; ".join(items[:most]) + more


def assert_graph_contract(results: list[CheckResult]) -> None:
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
            repair="The program was not written: a file that lacks these properties generates wrong text or crashes.",
        )
