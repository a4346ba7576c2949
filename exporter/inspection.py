"""Read a bundle or a program file back and hold it to the graph contract again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from exporter.backends import (
    checks_module,
    description_module,
    file_module,
    format_of_suffix,
    formats,
    traits,
)
from exporter.bundle import read_bundle
from exporter.describe import FileDescription
from exporter.errors import BundleError, ConfigError
from exporter.graph import ProgramContract
from exporter.graph.contract_file import LIMIT_CHECKS, ContractFile, ProgramForm
from exporter.programs import Limits, interface
from exporter.spec import PROGRAMS, CheckResult, Manifest, MethodSpec, ProgramSpec


@dataclass(frozen=True)
class Inspection:
    """`exported` are the checks of the traced programs as a bundle recorded them, `lowered` the files', run again.

    `manifest` is None when a program file was inspected alone; nothing is recorded then. `descriptions` are the files',
    one each.
    """

    name: str
    manifest: Manifest | None
    exported: tuple[CheckResult, ...]
    lowered: tuple[CheckResult, ...]
    descriptions: tuple[FileDescription, ...] = ()

    @property
    def checks(self) -> tuple[CheckResult, ...]:
        """Both; where the traced program and the file have equal results, only one of them."""
        said = {(check.format, check.name, check.program, check.evidence) for check in self.lowered}
        new = (c for c in self.exported if (c.format, c.name, c.program, c.evidence) not in said)
        return (*new, *self.lowered)

    @property
    def passed(self) -> bool:
        """Whether nothing is refused; a warning is not."""
        return not any(check.refused for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """What ``--format json`` prints."""
        return {
            "name": self.name,
            "passed": self.passed,
            "checks": [check.model_dump(mode="json") for check in (*self.exported, *self.lowered)],
            "files": [asdict(each) for each in self.descriptions],
        }


def inspect(path: Path, contract: ContractFile | None = None) -> Inspection:
    """Inspect a bundle directory, or one program alone; a file that does not describe itself (`.pte`) needs a
    `contract` with a `program` then, the others are held to a contract if one is given.

    Raises:
        BundleError: as `read_bundle`, or the file cannot be read.
        ConfigError: the contract does not fit the file.
        GraphContractError: the file is no program, or not one with these methods and inputs.
    """
    format = format_of_suffix(path.suffix)  # a missing .pte is a missing file, not a missing bundle
    if format is None and not os.path.isfile(path):
        return _inspect_bundle(path, contract)
    return _inspect_file(path, formats()[0] if format is None else format, contract)


def _inspect_bundle(path: Path, contract: ContractFile | None) -> Inspection:
    bundle = read_bundle(path)
    manifest = bundle.manifest
    _refuse_idle_limits(path, [program.format for program in manifest.programs], contract)
    exported, descriptions = [check for check in manifest.graph_checks if check.form == "traced"], []
    lowered: list[CheckResult] = []
    for program in manifest.programs:
        recorded = program if contract is None else None
        checks, description = _check(bundle.path / program.file, program.format, contract, program, recorded)
        descriptions.append(description)
        lowered += checks
    if contract is not None:
        exported, lowered = contract.required(exported, lowered)
    return Inspection(manifest.name, manifest, tuple(exported), tuple(lowered), tuple(descriptions))


def _inspect_file(path: Path, format: str, contract: ContractFile | None) -> Inspection:
    _refuse_idle_limits(path, [format], contract)
    described = traits(format).self_describing
    if contract is None and described:
        description = description_module(format).describe(file_module(format).read_file(path))
        return Inspection(path.name, None, (), (), (description,))
    if contract is None or contract.program is None:
        alone = "" if described else "a program file without a manifest and "
        raise ConfigError(
            f"inspect {path.name}",
            got=f"{alone}{'no contract' if contract is None else 'a contract without a `program`'}",
            expected="a contract whose `program` gives limits, vocabulary and states",
            repair="Pass --check contract.yaml with that section (docs/graph-contract.md), or the bundle directory.",
        )
    checks, description = _check(path, format, contract, None, None)
    _, required = contract.required([], checks)
    return Inspection(path.name, None, (), tuple(required), (description,))


def _check(
    path: Path, format: str, contract: ContractFile | None, program: ProgramSpec | None, recorded: ProgramSpec | None
) -> tuple[list[CheckResult], FileDescription]:
    """The checks on one program file, against what the contract or else the manifest's `program` says it is."""
    if contract is not None and contract.program is not None:
        contracts = _contracts_of_form(contract.program, format)
    else:
        assert program is not None
        contracts = [_contract_of(path, name, own, program) for name, own in program.methods.items()]
    file = file_module(format).read_file(path)
    results = checks_module(format).check_file(file, contracts, contract or ContractFile(), recorded)
    named = [result.model_copy(update={"format": format}) for result in results]
    return named, description_module(format).describe(file)


def _contract_of(path: Path, name: str, own: MethodSpec, program: ProgramSpec) -> ProgramContract:
    """What the manifest says of a method.

    Raises:
        BundleError: its inputs are not the states that the manifest lists beside it.
    """
    states, inputs = [state.name for state in program.states], [tensor.name for tensor in own.inputs[2:]]
    if inputs != states or set(own.mutates) != set(states):
        raise BundleError(
            f"bundle {path.parent.name}",
            got=f"manifest: {name} takes the states {inputs} and writes {list(own.mutates)}",
            expected=f"{states} of both",
            repair="Copy the bundle again, or export it again.",
        )
    return ProgramContract(name, own, program.states)


def _contracts_of_form(form: ProgramForm, format: str) -> list[ProgramContract]:
    limits = Limits(max_context_length=form.max_context_length, max_prefill_chunk=form.max_prefill_chunk)
    states, dtype = form.states(format), traits(format).ids_dtype
    return [
        ProgramContract(name, interface(states, form.vocab_size, kind, limits, dtype), states)
        for name, kind in PROGRAMS.items()
    ]


def _refuse_idle_limits(path: Path, formats: Sequence[str], contract: ContractFile | None) -> None:
    """Refuse a limit that no check of the formats here reads.

    Raises:
        ConfigError: the contract has such limits.
    """
    read = frozenset[str]().union(*(traits(format).limits for format in formats))
    given = contract.model_fields_set if contract is not None else set()
    idle = [key for key in LIMIT_CHECKS if key in given and key not in read]
    if idle:
        raise ConfigError(
            f"inspect {path.name}",
            got=f"a contract with {', '.join(idle)}",
            expected=f"limits that {', '.join(traits(format).title for format in formats)} programs are held to: "
            f"{', '.join(sorted(read)) or 'none'}",
            repair="Leave them out of the contract for this file.",
        )
