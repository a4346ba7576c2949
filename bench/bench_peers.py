"""Measure our bundles and what a user would pick instead, by turns in one run. Run by ``make bench-peers``.

Every measurement is a process of its own, a peer's in its peer's environment (``make peers`` makes those). Results are
written to docs/results/peers.json after each, so that ``--resume`` goes on where a run was cut off.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from measuring import RESULTS, Results
from peers.catalogue import LENGTHS, LOG_PROBABILITIES, MODELS, PEERS, Peer
from peers.cost import cost_file
from peers.schedule import Slot, schedule

ROOT = Path(__file__).resolve().parent.parent
WORKERS = ROOT / "bench" / "peers"
TIMEOUT = 1200
SCORE = (512, 1000)
NAMES = [peer.name for peer in PEERS]


def missing(peer: Peer, model: str, environments: Path) -> str | None:
    """Why the peer cannot run, and what would change that; None if it can."""
    repair = f"python bench/peers/install.py --only {peer.name}"
    if not (environments / peer.name / "installed.json").exists():
        return f"not installed: {repair}"
    if not peer.model(environments, model).exists() and peer.convert is not None:
        return f"model not converted: {repair}"
    return None


def warm(place: Path) -> None:
    """Read every file of a model once, so that no load waits for the disk."""
    for file in [place] if place.is_file() else sorted(place.rglob("*")):
        if file.is_file():
            with file.open("rb") as stream:
                while stream.read(1 << 22):
                    pass


def costs(places: Mapping[str, Path]) -> dict[str, Any]:
    """What making each took, where that is known: not of the GGUF itself, nor of a bundle that make did not make."""
    files = {name: cost_file(place) for name, place in places.items()}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def run_worker(command: list[str], request: dict[str, Any], variables: dict[str, str]) -> tuple[Any, str]:
    """The worker's result, or None and why."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "request.json"
        file.write_text(json.dumps(request))
        try:
            done = subprocess.run(
                [*command, str(file)], env=environment | variables, capture_output=True, text=True, errors="replace",
                timeout=TIMEOUT, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return None, f"no result after {TIMEOUT} s"
    lines = done.stdout.splitlines()
    try:
        return json.loads(lines[-1]), ""
    except (IndexError, ValueError):
        return None, ending(done.returncode, done.stderr or done.stdout)


def ending(code: int, output: str) -> str:
    """How a worker ended without a result: its exit code or signal, and the last line of its output, if any."""
    lines = [line for line in output.splitlines() if line.strip()]
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{how}: {lines[-1]}" if lines else f"{how}, no output"


def command_of(
    slot: Slot, model: str, bundles: dict[str, Path], environments: Path, gguf: Path
) -> tuple[list[str], Path]:
    """The worker of `slot` without its request, and the model it reads."""
    if slot.ours:
        place = bundles[slot.name]
        return [sys.executable, str(WORKERS / "worker_ours.py"), str(place)], place
    peer = next(peer for peer in PEERS if peer.name == slot.name)
    place = gguf if peer.convert is None else peer.model(environments, model)
    return [str(peer.python(environments)), str(WORKERS / f"worker_{peer.name}.py"), str(place)], place


def bench_model(
    model: str, bundles: dict[str, Path], environments: Path, *, rounds: int, threads: int, lengths: Iterable[int],
    chosen: Iterable[str], row: dict[str, Any], save: Any,
) -> None:  # fmt: skip
    """Fill `row` of the results: reference, missing peers, and the runs that it does not have yet."""
    reference_file = environments / "models" / model / "reference.json"
    if not reference_file.exists():
        command = [sys.executable, str(WORKERS / "prepare.py"), model, str(reference_file.parent)]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    reference = json.loads(reference_file.read_text())
    expected = reference_file.with_name(LOG_PROBABILITIES)
    reasons = {peer.name: missing(peer, model, environments) for peer in PEERS}
    row |= {"reference_nll": reference["nll"], "scored": SCORE[1]}
    row["costs"] = costs(bundles | {peer.name: peer.model(environments, model) for peer in PEERS})
    row["missing"] = {name: reason for name, reason in reasons.items() if reason is not None}
    ready = {peer.name: peer.longest for peer in PEERS if reasons[peer.name] is None and peer.name in chosen}
    row["runs"] = [run for run in row.get("runs", []) if run["result"]]  # what failed is tried again
    done = {(run["round"], run["index"], run["name"]) for run in row["runs"]}
    variables = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    for slot in schedule(list(bundles), ready, list(lengths), rounds):
        if (slot.round, slot.index, slot.name) in done:
            continue
        command, place = command_of(slot, model, bundles, environments, Path(reference["gguf"]))
        warm(place)
        request = {
            "ids": reference["ids"], "threads": threads, "lengths": slot.lengths, "repeats": 3,
            "score": SCORE if slot.scored else None, "expected": str(expected),
        }  # fmt: skip
        print(f"{model}: round {slot.round + 1} of {rounds}, {slot.name}, {max(slot.lengths)} tokens", flush=True)
        own = {"PYTHONPATH": str(ROOT)} if slot.ours else {}
        result, error = run_worker(command, request, variables | own)
        if error:
            print(f"  FAILED {slot.name}: {error}", flush=True)
        row["runs"].append(
            {"round": slot.round, "index": slot.index, "name": slot.name, "ours": slot.ours, "result": result}
            | ({"error": error} if error else {})
        )
        save()


def parse_bundles(texts: Iterable[str]) -> dict[str, dict[str, Path]]:
    """``MODEL=DIRECTORY`` -> model -> the preset's name, which is the directory's, -> directory."""
    bundles: dict[str, dict[str, Path]] = {}
    for text in texts:
        model, _, directory = text.partition("=")
        path = Path(directory).resolve()
        if model not in MODELS or not (path / "manifest.json").exists():
            raise typer.BadParameter(f"{text}: expected MODEL=BUNDLE with a model of {', '.join(MODELS)}")
        bundles.setdefault(model, {})[path.name] = path
    return bundles


def main(
    *,
    bundle: Annotated[list[str], typer.Option(help="MODEL=DIRECTORY; may be given several times, for a model too.")],
    environments: Annotated[Path, typer.Option(help="Where `make peers` put the peers.")] = ROOT / ".peers",
    peers: Annotated[str, typer.Option(help="Those to run, with commas.")] = ",".join(NAMES),
    lengths: Annotated[str, typer.Option(help="Tokens in the cache, with commas; the usual ones if not given.")] = "",
    rounds: int = 3,
    threads: int = 2,
    out: Path = RESULTS / "peers.json",
    resume: Annotated[bool, typer.Option("--resume", help="Keep the runs that `--out` has.")] = False,
) -> None:
    """Measure; the JSON is written after each process."""
    results = Results(out, keep=resume)
    results.own["threads"] = threads
    models = results.own.setdefault("models", {})
    for model, own in parse_bundles(bundle).items():
        wanted = [int(part) for part in lengths.split(",")] if lengths else LENGTHS[model]
        bench_model(
            model, own, environments.resolve(), rounds=rounds, threads=threads, lengths=wanted,
            chosen=peers.split(","), row=models.setdefault(model, {}), save=results.save,
        )  # fmt: skip
    results.save()
    print(out)


if __name__ == "__main__":
    typer.run(main)
