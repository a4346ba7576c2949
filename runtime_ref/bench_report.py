"""What `bench` prints and writes."""

from __future__ import annotations

import dataclasses
import datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.table import Table

from exporter.machine import machine
from exporter.units import in_unit
from runtime_ref.bench import Bench, Length

PACKAGES = ("ring-exporter", "torch", "executorch", "coreai-core")


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def as_json(found: Bench) -> dict[str, Any]:
    """Every figure, with the date, the machine and the versions beside them."""
    when = datetime.datetime.now().isoformat(timespec="seconds")
    return {"date": when, "machine": machine(), "versions": versions(), **dataclasses.asdict(found)}


def mb(size: float) -> str:
    return in_unit(size, "MB", 1)


def tables(found: Bench) -> tuple[Table, Table]:
    """Speeds by length, and the figures that have no length."""
    speeds = Table(
        "tokens", "prefill tok/s", "decode tok/s", "live cache", "memory's limit tok/s", "reached", "peak above bare",
        "anonymous", "file pages", title=f"{found.name}, {found.format} {found.weights}, {found.threads} threads",
    )  # fmt: skip
    for length in found.lengths:
        speeds.add_row(*_row(length, found))
    facts = Table("", "", title="The whole run", show_header=False)
    rows = {
        "load": f"{found.load_seconds:.3f} s",
        "first token of 128, load included": f"{found.first_token_seconds:.3f} s",
        "program": mb(found.program_bytes),
        "bare process": mb(found.bare_bytes),
        "peak above it": mb(found.peak_bytes - found.bare_bytes),
        "memory bandwidth": f"{in_unit(found.bandwidth, 'GB', 1)}/s",
        "NLL": "not measured" if found.nll is None else f"{found.nll:.4f} over {found.scored} tokens",
        "KL from float, recorded at export": (
            "not recorded" if found.export_kl is None else f"{found.export_kl:.4f} over {found.export_positions} tokens"
        ),
    }
    for name, value in rows.items():
        facts.add_row(name, value)
    return speeds, facts


def _row(length: Length, found: Bench) -> tuple[str, ...]:
    decode, reached = ("", "") if length.decode is None else (
        f"{length.decode:.1f}", f"{length.decode / length.limit:.0%}"
    )  # fmt: skip
    cells = (f"{length.prefill:.0f}", decode, mb(length.live_bytes), f"{length.limit:.0f}", reached)
    memory = [mb(length.peak_bytes - found.bare_bytes), "", ""]
    if length.resident is not None and found.bare is not None:
        memory[1] = mb(length.resident.anonymous - found.bare.anonymous)
        memory[2] = mb(length.resident.file - found.bare.file)
    return (str(length.tokens), *cells, *memory)
