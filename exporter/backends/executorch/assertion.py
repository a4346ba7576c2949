"""The graph contract as one call, for tests of programs."""

from __future__ import annotations

from collections.abc import Iterable

from torch.export import ExportedProgram

from exporter.backends.executorch.checks import check_lowered, runtime_registry
from exporter.graph.checks_export import check_exported
from exporter.graph.contract import DEFAULT_LIMITS, FileLimits, ProgramContract, refuse_failed
from exporter.spec import CheckResult


def assert_graph_contract(
    program: ExportedProgram | bytes,
    *contracts: ProgramContract,
    allowed_operators: Iterable[str] | None = None,
    limits: FileLimits = DEFAULT_LIMITS,
) -> list[CheckResult]:
    """Hold a program to its contract, in either form.

    Args:
        program: what ``torch.export.export`` returned, or the bytes of a `.pte`.
        contracts: the program's one, or one for each method of the file.
        allowed_operators: of a file, the kernels the target runtime has; None means those of the installed runtime.
        limits: of a file, what holds for it as a whole.

    Returns:
        Every check with its evidence.

    Raises:
        GraphContractError: names every failed check with its evidence, or says why the program cannot be read.
    """
    if isinstance(program, bytes):
        allowed = runtime_registry()[1] if allowed_operators is None else frozenset(allowed_operators)
        results = check_lowered(program, contracts, allowed, limits)
    else:
        assert allowed_operators is None and limits == DEFAULT_LIMITS, "an exported program is no file"
        assert len(contracts) == 1, "an exported program is one method"
        results = check_exported(program, contracts[0])
    refuse_failed(results)
    return results
