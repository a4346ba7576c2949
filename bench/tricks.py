"""What each cost trick saves: an export of a real model with all of them, and with one left out at a time.

``python bench/tricks.py`` writes docs/results/tricks.json; about 40 minutes on a machine that does nothing else.
"""

from __future__ import annotations

import hashlib
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from measuring import RESULTS, Results
from peers.cost import run
from rich.progress import track

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = """\
import sys
from exporter.tricks.base import Trick
applies, left_out = Trick.applies, sys.argv.pop(1)
Trick.applies = lambda trick: trick.name != left_out and applies(trick)
from exporter.cli.app import main
main()
"""


def names() -> list[str]:
    """Every trick: the modules of `exporter.tricks` but those that say what one is."""
    return sorted(
        path.stem for path in (ROOT / "exporter" / "tricks").glob("*.py") if path.stem not in {"__init__", "base"}
    )


def export(config: Path, left_out: str, folder: Path) -> dict[str, float | str]:
    """Cost of one export without the trick `left_out` ("" for none), and the hash of its program.

    Raises:
        CalledProcessError: it failed.
    """
    command = [
        sys.executable,
        "-c",
        LEFT_OUT,
        left_out,
        "export",
        "--model",
        str(config),
        "--out",
        str(folder / "bundle"),
    ]
    with (folder / "log").open("w") as log:
        code, cost = run(command, output=log)
    if code:
        raise subprocess.CalledProcessError(code, command, (folder / "log").read_text())
    digest = hashlib.sha256((folder / "bundle" / "model.pte").read_bytes()).hexdigest()
    return {**cost, "sha256": digest}


def main(
    config: Annotated[Path, typer.Option(help="The YAML of the export.")] = ROOT / "configs" / "gemma3_270m.yaml",
    rounds: Annotated[int, typer.Option(help="Exports of each kind, by turns.")] = 2,
    only: Annotated[list[str] | None, typer.Option(help="Leave out these alone, one at a time.")] = None,
) -> None:
    """Measure by turns, so that a slow minute of the machine is everybody's."""
    results = Results(RESULTS / "tricks.json", keep=bool(only))
    kinds = ["", *(only or names())]
    seen: dict[str, list[dict[str, float | str]]] = {kind: [] for kind in kinds}
    for kind in track([kind for _ in range(rounds) for kind in kinds], "exports"):
        with tempfile.TemporaryDirectory() as folder:
            seen[kind].append(export(config, kind, Path(folder)))
    for kind, runs in seen.items():
        results.own.setdefault("runs", {})[kind or "all of them"] = {
            "rounds": rounds,
            "cpu_seconds": statistics.median(float(one["cpu_seconds"]) for one in runs),
            "peak_bytes": statistics.median(float(one["peak_bytes"]) for one in runs),
            "same_program": {one["sha256"] for one in runs} == {seen[""][0]["sha256"]},
        }
        print(kind or "all of them", results.own["runs"][kind or "all of them"])
    results.save()


if __name__ == "__main__":
    typer.run(main)
