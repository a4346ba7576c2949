"""Read a bundle or a program file back and hold it to the graph contract again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from exporter.backends import self_describing
from exporter.bundle import read_bundle
from exporter.describe import FileDescription
from exporter.errors import BundleError, ConfigError
from exporter.graph import ProgramContract, check_lowered, read_pte, runtime_registry
from exporter.graph.contract import EXPORTED_CHECKS
from exporter.graph.contract_file import LIMIT_CHECKS, ContractFile, ProgramForm
from exporter.programs import METHODS, Limits, interface
from exporter.spec import IDS_DTYPES, CheckResult, Format, Manifest, ProgramSpec


@dataclass(frozen=True)
class MethodFacts:
    """What a method costs and needs: memory planned beside the states, kernels called outside the delegates."""

    planned_bytes: int
    operators: tuple[str, ...]


@dataclass(frozen=True)
class FileFacts:
    """What was read in a program file. `named_bytes` are weights that delegates look up by name.

    Segments may share bytes of the file, so `constant_bytes` and `named_bytes` together may exceed `file_bytes`.
    """

    file: str
    file_bytes: int
    constant_bytes: int
    named_bytes: int
    methods: Mapping[str, MethodFacts]


@dataclass(frozen=True)
class Inspection:
    """`exported` are the checks of the traced programs as a bundle recorded them, `lowered` the files', run again.

    `manifest` is None when a program file was inspected alone; nothing is recorded then. `facts` are those of `.pte`
    files, `descriptions` those of the other formats.
    """

    name: str
    manifest: Manifest | None
    exported: tuple[CheckResult, ...]
    lowered: tuple[CheckResult, ...]
    facts: tuple[FileFacts, ...] = ()
    descriptions: tuple[FileDescription, ...] = ()

    @property
    def checks(self) -> tuple[CheckResult, ...]:
        """Both, without what the traced program says in the same words as the file."""
        return (*(check for check in self.exported if check not in self.lowered), *self.lowered)

    @property
    def passed(self) -> bool:
        """Whether nothing is refused; a warning is not."""
        return not any(check.refused for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """What ``--format json`` prints."""
        forms = [("exported", check) for check in self.exported] + [("file", check) for check in self.lowered]
        return {
            "name": self.name,
            "passed": self.passed,
            "checks": [{"form": form, **check.model_dump(mode="json")} for form, check in forms],
            "files": [*(asdict(facts) for facts in self.facts), *(asdict(each) for each in self.descriptions)],
        }


Other = Literal["coreml", "coreai"]
SUFFIXES: dict[str, Format] = {".pte": "executorch", ".mlpackage": "coreml", ".aimodel": "coreai"}


def inspect(path: Path, contract: ContractFile | None = None) -> Inspection:
    """Inspect a bundle directory, or one program alone; a `.pte` alone needs a `contract` with a `program`, the others
    say by themselves what they are, and are held to a contract if one is given.

    Raises:
        BundleError: as `read_bundle`, or the file cannot be read.
        ConfigError: the contract does not fit the file.
        GraphContractError: the file is no program, or not one with these methods and inputs.
    """
    format = SUFFIXES.get(path.suffix)  # a missing .pte is a missing file, not a missing bundle
    if format is None and not path.is_file():
        return _inspect_bundle(path, contract)
    if format is None or format == "executorch":
        return _inspect_pte(path, contract)
    return _inspect_other(path, format, contract)


def _inspect_bundle(path: Path, contract: ContractFile | None) -> Inspection:
    bundle = read_bundle(path)
    manifest = bundle.manifest
    _refuse_idle_limits(path, [program.format for program in manifest.programs], contract)
    exported, facts, descriptions = _exported(manifest.graph_checks), [], []
    lowered: list[CheckResult] = []
    for program in manifest.programs:
        file, contracts = bundle.path / program.file, _contracts(program, contract)
        if program.format == "executorch":
            # Without a contract the file is held to the kernels the manifest lists.
            operators = frozenset(program.operators) if contract is None else contract.operators(*runtime_registry())
            checks, found = _check_pte(file, contracts, operators, contract or ContractFile())
            facts.append(found)
        else:
            back_end = self_describing(program.format)
            opened = back_end.read_file(file)
            checks = _check_other(opened, program.format, contracts)
            descriptions.append(back_end.describe(opened))
        lowered += checks
    if contract is not None:
        exported, lowered = contract.required(exported, lowered)
    return Inspection(manifest.name, manifest, tuple(exported), tuple(lowered), tuple(facts), tuple(descriptions))


def _exported(recorded: Iterable[CheckResult]) -> list[CheckResult]:
    """The recorded checks of traced programs; those of the same name of the file were recorded after them. The other
    formats are checked as files only."""
    first: dict[tuple[str, str], CheckResult] = {}
    for check in recorded:
        if check.format == "executorch" and check.name in EXPORTED_CHECKS:
            first.setdefault((check.name, check.program), check)
    return list(first.values())


def _contracts(program: ProgramSpec, contract: ContractFile | None) -> list[ProgramContract]:
    if contract is not None and contract.program is not None:
        return _contracts_of_form(contract.program, program.format)
    return [ProgramContract(name, interface, program.states) for name, interface in program.methods.items()]


def _contracts_of_form(form: ProgramForm, format: Format) -> list[ProgramContract]:
    limits = Limits(max_context_length=form.max_context_length, max_prefill_chunk=form.max_prefill_chunk)
    states = form.states(format)
    dtype = IDS_DTYPES[format]
    return [ProgramContract(name, interface(states, form.vocab_size, name, limits, dtype), states) for name in METHODS]


def _inspect_pte(path: Path, contract: ContractFile | None) -> Inspection:
    if contract is None or contract.program is None:
        raise ConfigError(
            f"inspect {path.name}",
            got="a program file without a manifest" + (" and no contract" if contract is None else ""),
            expected="a contract whose `program` gives limits, vocabulary and states",
            repair="Pass --check contract.yaml with that section (docs/graph-contract.md), or the bundle directory.",
        )
    operators = contract.operators(*runtime_registry())
    lowered, facts = _check_pte(path, _contracts_of_form(contract.program, "executorch"), operators, contract)
    _, required = contract.required([], lowered)
    return Inspection(path.name, None, (), tuple(required), (facts,))


def _inspect_other(path: Path, format: Other, contract: ContractFile | None) -> Inspection:
    _refuse_idle_limits(path, [format], contract)
    opened = self_describing(format).read_file(path)
    description = self_describing(format).describe(opened)
    checks: list[CheckResult] = []
    if contract is not None:
        if contract.program is None:
            raise ConfigError(
                f"inspect {path.name}",
                got="a contract without a `program`",
                expected="one whose `program` gives limits, vocabulary and states",
                repair="Add that section (docs/graph-contract.md), or pass the bundle directory.",
            )
        checks = _check_other(opened, format, _contracts_of_form(contract.program, format))
        _, checks = contract.required([], checks)
    return Inspection(path.name, None, (), tuple(checks), (), (description,))


def _refuse_idle_limits(path: Path, formats: Sequence[Format], contract: ContractFile | None) -> None:
    """Limits are those of a `.pte`: where there is none, nothing would be held to them.

    Raises:
        ConfigError: the contract has limits and there is no `.pte`.
    """
    idle = [key for key in LIMIT_CHECKS if contract is not None and key in contract.model_fields_set]
    if idle and "executorch" not in formats:
        raise ConfigError(
            f"inspect {path.name}",
            got=f"a contract with {', '.join(idle)}",
            expected="no limits: they are those of a .pte, which is not here",
            repair="Leave them out of the contract for this file.",
        )


def _check_other(file: Any, format: Other, contracts: Sequence[ProgramContract]) -> list[CheckResult]:
    results = self_describing(format).check_file(file, contracts)
    return [result.model_copy(update={"format": format}) for result in results]


def _check_pte(
    path: Path, contracts: Sequence[ProgramContract], operators: frozenset[str], contract: ContractFile
) -> tuple[list[CheckResult], FileFacts]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BundleError(
            f"program {path.name}", got=str(error), expected="a readable file", repair="Check the path."
        ) from error
    checks = check_lowered(data, contract.bind(contracts), operators, contract.limits)
    file = read_pte(data)
    methods = {name: MethodFacts(plan.planned_bytes, plan.operators_called()) for name, plan in file.plans.items()}
    return checks, FileFacts(path.name, file.size, file.constant_bytes, file.named_bytes, methods)
