"""The YAML file of a contract: what a program file must satisfy, for a CI that has only the file.

``python -m exporter inspect FILE --check contract.yaml`` reads it. Every key may be absent, but for a bare `.pte`
`program` has to say what a bundle's manifest would.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, field_validator, model_validator

from exporter.config import read_yaml_model
from exporter.errors import ConfigError
from exporter.graph.contract import COREML_CHECKS, EXPORTED_CHECKS, FILE_CHECKS, FileLimits, ProgramContract
from exporter.spec import CheckResult, DType, Format, StateSpec, cache_states, stacked, state_name

Count = Annotated[StrictInt, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LayerForm(_Part):
    """`count` layers with equal state, in the order of the program's inputs.

    A ``ring`` or ``full`` layer has keys and values, `row_shape` ``[KV heads, head_dim]``, and where these are int8 a
    float32 scale for each row and KV head; a ``conv`` layer has one state, `row_shape` ``[hidden size]``. `rows` is the
    number of a ring (its capacity) or a convolution; a full state grows to the context.
    """

    kind: Literal["ring", "full", "conv"]
    row_shape: tuple[Count, ...]
    rows: Count | None = None
    count: Count = 1
    dtype: DType = "float32"

    @model_validator(mode="after")
    def _rows_fit_the_kind(self) -> LayerForm:
        if (self.rows is None) != (self.kind == "full"):
            raise ValueError("rows for kind ring and conv, and none for full, which grows to max_context_length")
        axes = 1 if self.kind == "conv" else 2
        if len(self.row_shape) != axes:
            raise ValueError(f"a row_shape of {axes} for kind {self.kind}, not {len(self.row_shape)}")
        return self


class ProgramForm(_Part):
    """What a manifest says of a program: its limits, vocabulary and states."""

    max_context_length: Annotated[StrictInt, Field(ge=2)]
    max_prefill_chunk: Annotated[StrictInt, Field(ge=2)]
    vocab_size: Count
    layers: tuple[LayerForm, ...] = Field(min_length=1)

    def states(self, format: Format = "executorch") -> tuple[StateSpec, ...]:
        """The states in the order of a program's inputs, named and laid out as the exporter does for `format`."""
        found: list[StateSpec] = []
        forms = [form for form in self.layers for _ in range(form.count)]
        for index, form in enumerate(forms):
            rows = self.max_context_length if form.rows is None else form.rows
            if form.kind == "conv":
                found.append(
                    StateSpec(
                        name=state_name(index, "inputs"), layers=(index,), kind="conv", role="inputs", rows=rows,
                        max_rows=rows, window=None, row_shape=form.row_shape, dtype=form.dtype,
                    )
                )  # fmt: skip
            else:
                found += cache_states(
                    layer=index, kind=form.kind, rows=rows, max_rows=rows, window=None, dtype=form.dtype,
                    row_shape=form.row_shape,
                )  # fmt: skip
        if format == "coreml":
            return tuple(state.model_copy(update={"static": True, "dtype": "float16"}) for state in found)
        return stacked(found) if format == "coreai" else tuple(found)


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
        min_delegated_share: floors by method, which a file must meet; for a method left out there are only warnings.
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
        known = sorted({*EXPORTED_CHECKS, *FILE_CHECKS, *COREML_CHECKS})
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
                min_delegated_share=self.min_delegated_share.get(contract.method),
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
