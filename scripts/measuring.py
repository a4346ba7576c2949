"""What the measuring scripts share: a process for each measurement, so that its peak memory is its own, and tables."""

from __future__ import annotations

import datetime
import json
import multiprocessing
import resource
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from exporter.machine import machine, peak_memory_bytes
from exporter.quiet import quieten_libraries


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


def ended(code: int) -> str:
    """How a process ended that returned `code`, as ``subprocess`` and ``multiprocessing`` give it: below zero, by that
    signal."""
    if code >= 0:
        return f"exit code {code}"
    names = {int(number): number.name for number in signal.Signals}
    return f"killed by {names.get(-code, f'signal {-code}')}"


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
        process.join()
        assert process.exitcode is not None
        raise SystemExit(f"{work.__name__} {arguments} failed: {ended(process.exitcode)}") from None
    process.join()
    return result


def measure(
    results: dict[str, Any], name: str, works: Sequence[Callable[..., dict[str, Any]]], arguments: Sequence[Any],
    bundle: Path, *, out: Path, keep: bool,
) -> None:  # fmt: skip
    """Fill row `name` of `results`, each of `works` under its own name, and write `out` after each; `keep` leaves what
    the row has where `bundle`, their last argument, is there already; without it the row is another bundle's."""
    row = results["rows"].setdefault(name, {})
    if not (keep and bundle.exists()):
        row.clear()
    for work in works:
        if work.__name__ in row:
            continue
        print(f"{name}: {work.__name__}", flush=True)
        row[work.__name__] = in_process(work, *arguments, bundle)
        results |= {"machine": machine(), "date": datetime.date.today().isoformat()}
        out.write_text(json.dumps(results, indent=1) + "\n")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    body = [f"| {' | '.join(row)} |" for row in (columns, *rows)]
    return "\n".join([body[0], "|" + "---|" * len(columns), *body[1:]])
