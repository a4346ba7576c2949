"""The YAML file of a contract: what a program file must satisfy, for a CI that has only the file.

``python -m exporter inspect FILE --check contract.yaml`` reads it. Every key may be absent, but a `.pte` without a
bundle needs `program` in place of the manifest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StrictInt, field_validator, model_validator

from exporter.backends import traits
from exporter.config import read_yaml_model
from exporter.errors import ConfigError
from exporter.graph.contract import (
    FileLimits,
    ProgramContract,
    delegated_floor,
    known_checks,
)
from exporter.kinds import KINDS, Rows, StateForm, kind_of, one_of
from exporter.spec import CheckResult, DType, StateSpec, laid_out

Count = Annotated[StrictInt, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LayerForm(_Part):
    """`count` layers with equal state, in the order of the program's inputs.

    A ``ring`` or ``full`` layer has keys and values, `row_shape` ``[KV heads, head_dim]``, and where these are int8 a
    float32 scale for each row and KV head; a ``conv`` layer has one state, `row_shape` ``[hidden size]``. `rows` is the
    number of a state that does not grow; one that grows does so to the context. `dtype` is the format's own where it is
    left out.
    """

    kind: str
    row_shape: tuple[Count, ...]
    rows: Count | None = None
    count: Count = 1
    dtype: DType | None = None

    @field_validator("kind")
    @classmethod
    def _kind_exists(cls, value: str) -> str:
        return one_of(value, KINDS)

    @model_validator(mode="after")
    def _shape_fits_the_kind(self) -> LayerForm:
        kind = kind_of(self.kind)
        if (self.rows is None) != kind.grows:
            named = [[k.name for k in KINDS.values() if k.grows == grows] for grows in (False, True)]
            fixed, growing = map(" and ".join, named)
            raise ValueError(f"rows for kind {fixed}, and none for {growing}, which grows to max_context_length")
        if len(self.row_shape) != kind.row_axes:
            raise ValueError(f"a row_shape of {kind.row_axes} for kind {self.kind}, not {len(self.row_shape)}")
        if self.dtype not in (None, *kind.dtypes):
            raise ValueError(f"a dtype among {', '.join(kind.dtypes)} for kind {self.kind}, not {self.dtype}")
        return self

    def states(self, layer: int, max_context_length: int, dtype: DType) -> tuple[StateSpec, ...]:
        """Of one of these layers, in `dtype` where none is said."""
        rows = self.rows or max_context_length
        form = StateForm(kind=self.kind, row_shape=self.row_shape)
        return kind_of(self.kind).states(layer, form, Rows(rows, rows), self.dtype or dtype)


class ProgramForm(_Part):
    """The parts of a manifest that describe a program: limits, vocabulary and states."""

    max_context_length: Annotated[StrictInt, Field(ge=2)]
    max_prefill_chunk: Annotated[StrictInt, Field(ge=2)]
    vocab_size: Count
    layers: tuple[LayerForm, ...] = Field(min_length=1)

    def states(self, format: str) -> tuple[StateSpec, ...]:
        """The states in the order of a program's inputs, named and laid out as the exporter does for `format`."""
        forms = [form for form in self.layers for _ in range(form.count)]
        dtype = traits(format).state_dtype or "float32"
        own = [form.states(layer, self.max_context_length, dtype) for layer, form in enumerate(forms)]
        return laid_out([state for states in own for state in states], traits(format).layout)


LIMIT_CHECKS = {
    "min_delegated_share": "delegated_share", "max_planned_bytes": "planned_bytes", "max_file_bytes": "file_bytes",
    "max_duplicate_share": "weights_stored_once", "runtime": "operators_in_registry",
    "allowed_operators": "operators_in_registry",
}  # fmt: skip
"""Which check reads which limit of a contract."""


class ContractFile(_Part):
    """A contract.

    Args:
        checks: the checks that are required; None means all that run.
        min_delegated_share: floors by method; a method left out keeps the exporter's own.
        max_planned_bytes: ceilings by method.
        max_file_bytes: of the program file.
        max_duplicate_share: repeated over unique bytes stay below it.
        runtime: the name of the installed runtime whose kernels are the allowed ones; another one is refused.
        allowed_operators: the allowed kernels themselves. Without either, those of the installed runtime.
        program: what the file must be, instead of what its manifest says.
    """

    checks: tuple[str, ...] | None = None
    min_delegated_share: dict[str, Share] = {}
    max_planned_bytes: dict[str, Count] = {}
    max_file_bytes: Count | None = None
    max_duplicate_share: Share = FileLimits.max_duplicate_share
    runtime: str | None = None
    allowed_operators: tuple[str, ...] | None = None
    program: ProgramForm | None = None

    @field_validator("checks")
    @classmethod
    def _checks_exist(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        known = sorted(known_checks())
        unknown = [name for name in value or () if name not in known]
        if unknown:
            raise ValueError(f"some of {', '.join(known)}, not {', '.join(unknown)}")
        if value is not None and not value:
            raise ValueError("at least one check; leave the key out to require all")
        return value

    @model_validator(mode="after")
    def _one_registry(self) -> ContractFile:
        if self.runtime is not None and self.allowed_operators is not None:
            raise ValueError("at most one of runtime and allowed_operators")
        return self

    @model_validator(mode="after")
    def _limits_are_checked(self) -> ContractFile:
        idle = [
            f"{key} needs the check {check}"
            for key, check in LIMIT_CHECKS.items()
            if key in self.model_fields_set and self.checks is not None and check not in self.checks
        ]
        if idle:
            raise ValueError(f"no limit that nothing checks: {'; '.join(idle)}")
        return self

    @property
    def limits(self) -> FileLimits:
        return FileLimits(max_duplicate_share=self.max_duplicate_share, max_file_bytes=self.max_file_bytes)

    def bind(self, contracts: Sequence[ProgramContract]) -> list[ProgramContract]:
        """The contracts of a file's methods with the floors and ceilings of this one.

        Raises:
            ConfigError: a limit names a method that the file need not have.
        """
        methods = [contract.method for contract in contracts]
        for key in ("min_delegated_share", "max_planned_bytes"):
            named: Mapping[str, object] = getattr(self, key)
            unknown = [method for method in named if method not in methods]
            if unknown:
                raise ConfigError(
                    "contract", got=f"{key} for {', '.join(unknown)}", expected=f"methods among {', '.join(methods)}",
                    repair="Name the methods of the program file.",
                )  # fmt: skip
        return [
            dataclasses.replace(
                contract,
                min_delegated_share=self.min_delegated_share.get(
                    contract.method, delegated_floor(contract.method, contract.states)
                ),
                max_planned_bytes=self.max_planned_bytes.get(contract.method),
            )
            for contract in contracts
        ]

    def operators(self, runtime: str, registry: frozenset[str]) -> frozenset[str]:
        """The kernels a file may call, given the installed runtime's name and registry.

        Raises:
            ConfigError: the contract names another runtime.
        """
        if self.allowed_operators is not None:
            return frozenset(self.allowed_operators)
        if self.runtime not in (None, runtime):
            raise ConfigError(
                "contract", got=f"runtime {self.runtime!r}", expected=f"{runtime}, the installed one",
                repair="Install that runtime, or list allowed_operators.",
            )  # fmt: skip
        return registry

    def required(
        self, exported: Sequence[CheckResult], lowered: Sequence[CheckResult]
    ) -> tuple[list[CheckResult], list[CheckResult]]:
        """The results of the required checks, of each form.

        Raises:
            ConfigError: a required check did not run on this file.
        """
        if self.checks is None:
            return list(exported), list(lowered)
        ran = {result.name for result in (*exported, *lowered)}
        absent = [name for name in self.checks if name not in ran]
        if absent:
            raise ConfigError(
                "contract",
                got=f"the check {', '.join(absent)}, which did not run",
                expected=f"some of {', '.join(sorted(ran))}",
                repair="Checks of exported programs are recorded in bundles; a .pte alone has those of files.",
            )
        kept = [[result for result in results if result.name in self.checks] for results in (exported, lowered)]
        return kept[0], kept[1]


def load_contract(path: Path) -> ContractFile:
    """Read a contract.

    Raises:
        ConfigError: the file is missing or no YAML, a key or a check's name is unknown, a value is out of range.
    """
    return read_yaml_model(path, ContractFile, "docs/graph-contract.md")
