"""The cost of a command: CPU seconds and peak memory of its process and of the processes it waited for.

``python cost.py FILE COMMAND...`` runs a command, writes its cost to a file if it succeeds and returns its exit code.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any


def cost_file(place: Path) -> Path:
    """Where the cost of making a bundle or a converted model is kept: beside it."""
    return place.with_name(f"{place.name}.cost.json")


def run(
    command: Sequence[str], output: IO[str] | None = None, variables: Mapping[str, str] | None = None
) -> tuple[int, dict[str, float]]:
    """Run `command` to its end.

    Args:
        output: where it writes, errors too; None for where this process does.
        variables: of the environment, beside those there are.

    Returns:
        The exit code; `cpu_seconds`, and `peak_bytes` resident of the largest process.
    """
    errors = None if output is None else subprocess.STDOUT
    process = subprocess.Popen(command, stdout=output, stderr=errors, env={**os.environ, **(variables or {})})
    return finish(process)


def finish(process: subprocess.Popen[Any]) -> tuple[int, dict[str, float]]:
    """Wait for `process`; returns as `run`."""
    # Not `Popen.wait`: the usage of all children would have another command's peak.
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, {
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * 1024,
    }


if __name__ == "__main__":
    code, cost = run(sys.argv[2:])
    if code == 0:
        Path(sys.argv[1]).write_text(json.dumps(cost) + "\n")
    # A command killed by a signal has a negative code; a shell reports 128 plus the signal.
    raise SystemExit(code if code >= 0 else 128 - code)
