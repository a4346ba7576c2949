"""What the measuring scripts share: a process for each measurement, so that its peak memory is its own, and the JSON
files of docs/results."""

from __future__ import annotations

import datetime
import json
import multiprocessing
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from exporter.machine import machine, peak_memory_bytes
from exporter.quiet import quieten_libraries

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"


class Results:
    """A JSON file of docs/results: ``{"runs": [...]}``, one run for each machine.

    Attributes:
        own: the run of this machine, to be filled.
    """

    def __init__(self, file: Path, *, keep: bool) -> None:
        """Read `file`, if it is there. The run of this machine begins anew unless `keep`; those of others stay."""
        self.file = file
        self._runs = {run["machine"]: run for run in json.loads(file.read_text())["runs"]} if file.exists() else {}
        self.own: dict[str, Any] = self._runs.get(machine(), {}) if keep else {}

    def save(self) -> None:
        """Write the file, with this machine and this day."""
        here = {"machine": machine(), "date": datetime.date.today().isoformat()}
        self._runs[here["machine"]] = here | self.own | here
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps({"runs": list(self._runs.values())}, indent=1) + "\n")


def cost_of(work: Callable[[], object]) -> dict[str, float]:
    """Wall and CPU seconds of `work` in this process (CPU of its start too), and the process's peak memory."""
    start = time.perf_counter()
    work()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "wall_seconds": time.perf_counter() - start,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_bytes": peak_memory_bytes(),
    }


def _child(work: Callable[..., dict[str, Any]], arguments: Sequence[Any], pipe: Any) -> None:
    quieten_libraries()
    pipe.send(work(*arguments))


def in_process(work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(work, arguments, theirs))
    process.start()
    theirs.close()
    try:
        result: dict[str, Any] = ours.recv()
    except EOFError:
        raise SystemExit(f"{work.__name__} {arguments} failed") from None
    process.join()
    return result


def measure(
    results: Results, name: str, works: Sequence[Callable[..., dict[str, Any]]], arguments: Sequence[Any], bundle: Path,
    *, keep: bool,
) -> None:  # fmt: skip
    """Fill row `name` of this machine's run, each of `works` under its own name, and save after each.

    Args:
        bundle: the last argument of each work.
        keep: leave what the row has where `bundle` is there already; without it the row is another bundle's.
    """
    row = results.own.setdefault("rows", {}).setdefault(name, {})
    if not (keep and bundle.exists()):
        row.clear()
    for work in works:
        if work.__name__ in row:
            continue
        print(f"{name}: {work.__name__}", flush=True)
        row[work.__name__] = in_process(work, *arguments, bundle)
        results.save()
