"""Predictions of bundles beside float32's on every text, into docs/results/quality.json. Run by ``make quality``.

Each bundle and the Transformers model of its checkpoint run in a process of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from bench_peers import parse_bundles
from measuring import RESULTS, Results, in_process

ROOT = Path(__file__).resolve().parent.parent


def quality(bundle: Path, reference: Path, positions: int) -> dict[str, Any]:
    """Every score, and what the file is."""
    from exporter.bundle import read_bundle
    from exporter.quality.domains import DOMAINS
    from runtime_ref.programs import choose, prepare_runtime
    from runtime_ref.quality import open_reference
    from runtime_ref.quality import quality as measure

    opened = choose(read_bundle(bundle), None)
    program = opened.manifest.program
    prepare_runtime(program.format)
    scores = [one.model_dump() for one in measure(opened, open_reference(reference), DOMAINS, positions)]
    size = sum(
        entry.bytes for name, entry in opened.manifest.files.items() if f"{name}/".startswith(f"{program.file}/")
    )
    preset = program.quality.preset if program.quality is not None else None
    return {"preset": preset, "weights": program.weights, "file_bytes": size, "domains": scores}


def main(
    bundle: Annotated[list[str], typer.Option(help="MODEL=DIRECTORY of a config's name; may be given several times.")],
    positions: Annotated[int, typer.Option(help="Tokens to score of each text.")] = 1000,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the bundles that the file has.")] = False,
) -> None:
    """Measure; the JSON is written after each bundle."""
    from exporter.config import load_config
    from exporter.source import open_source

    results = Results(RESULTS / "quality.json", keep=resume)
    results.own["positions"] = positions
    models = results.own.setdefault("models", {})
    for model, places in parse_bundles(bundle).items():
        checkpoint = open_source(load_config(ROOT / "configs" / f"{model}.yaml")).checkpoint
        row = models.setdefault(model, {})
        for name, place in places.items():
            if name in row:
                continue
            print(f"{model}: {name}", flush=True)
            row[name] = in_process(quality, place, checkpoint.path, positions)
            results.save()


if __name__ == "__main__":
    typer.run(main)
