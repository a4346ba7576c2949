"""Read a bundle back and hold its program file to the graph contract again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from exporter.bundle import read_bundle
from exporter.graph import ProgramContract, check_lowered
from exporter.spec import CheckResult, Manifest


@dataclass(frozen=True)
class Inspection:
    """A bundle's manifest; `checks` are those of the traced programs as recorded, and the file's, run again."""

    manifest: Manifest
    checks: tuple[CheckResult, ...]


def inspect_bundle(path: Path) -> Inspection:
    """Check files against the manifest, and the lowered program against its contract.

    Raises:
        BundleError: as `read_bundle`.
    """
    bundle = read_bundle(path)
    manifest = bundle.manifest
    checks = list(manifest.graph_checks)
    for program in manifest.programs:
        contracts = [
            ProgramContract(method=name, interface=interface, states=manifest.states)
            for name, interface in program.methods.items()
        ]
        data = (bundle.path / program.file).read_bytes()
        again = check_lowered(data, contracts, frozenset(program.operators))
        recorded = {(check.name, check.program, check.evidence) for check in again}
        checks = [check for check in checks if (check.name, check.program, check.evidence) not in recorded] + again
    return Inspection(manifest, tuple(checks))
