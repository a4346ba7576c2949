"""Install every peer into an environment of its own and convert both models for it. Run by ``make peers``.

What is installed or converted already stays. A failed peer is reported with the end of its log; the others go on.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import cost
import typer
from catalogue import MODELS, PEERS, Peer

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
NAMES = [peer.name for peer in PEERS]


class StepError(Exception):
    """A command failed; the text has its name and the end of its output."""


def run(command: Sequence[str], log: Path, variables: Mapping[str, str]) -> dict[str, float]:
    """Run the command and return its cost; its output goes to `log`.

    Raises:
        StepError: it failed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        code, taken = cost.run(command, output, variables)
    if code:
        lines = [line[:300] for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise StepError(f"exit code {code}; the end of {log.name}:\n    " + "\n    ".join(lines[-8:]))
    return taken


def install(peer: Peer, environments: Path) -> None:
    """Fill the peer's environment, unless it holds these very requirements."""
    place = environments / peer.name
    wanted = json.dumps([peer.requirements, peer.remove, peer.variables])
    marker = place / "installed.json"
    if marker.exists() and marker.read_text() == wanted:
        return
    print(f"{peer.title}: installing {', '.join(peer.requirements)}", flush=True)
    run([sys.executable, "-m", "venv", "--clear", str(peer.environment(environments))], place / "venv.log", {})
    pip = [str(peer.python(environments)), "-m", "pip"]
    run([*pip, "install", *peer.requirements], place / "install.log", peer.variables)
    if peer.remove:
        run([*pip, "uninstall", "--yes", *peer.remove], place / "remove.log", {})
    marker.write_text(wanted)


def convert(peer: Peer, model: str, environments: Path) -> None:
    """Convert one model, unless it is there, and write what that cost beside it; half a conversion is never left in its
    place."""
    target = peer.model(environments, model)
    if peer.convert is None or target.exists():
        return
    print(f"{peer.title}: converting {MODELS[model]}", flush=True)
    partial = target.with_name(f"{model}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    checkpoint = environments / "models" / model / "checkpoint"
    command = peer.convert(peer.python(environments).parent, checkpoint, partial)
    taken = run(command, target.with_name(f"{model}.log"), {"HF_HUB_OFFLINE": "1"})
    cost.cost_file(target).write_text(json.dumps(taken) + "\n")
    partial.rename(target)


def main(
    environments: Path = ROOT / ".peers",
    only: Annotated[str, typer.Option(help="Peers, with commas.")] = ",".join(NAMES),
) -> None:
    """Install and convert."""
    environments = environments.resolve()
    for model in MODELS:
        directory = environments / "models" / model
        if not (directory / "reference.json").exists():
            print(f"{MODELS[model]}: checkpoint and float32 reference", flush=True)
            command = [sys.executable, str(HERE / "prepare.py"), model, str(directory)]
            run(command, environments / "models" / f"{model}.log", {"PYTHONPATH": str(ROOT)})
    failed: dict[str, StepError] = {}
    for peer in PEERS:
        if peer.name not in only.split(","):
            continue
        try:
            install(peer, environments)
            for model in MODELS:
                convert(peer, model, environments)
        except StepError as error:
            failed[peer.title] = error
    for title, reason in failed.items():
        print(f"FAILED {title}: {reason}")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
