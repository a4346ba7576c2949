"""Measure Gemma 3 270M as Core ML and Core AI programs into docs/results/apple-models.json. Run by ``make apple``.

Every measurement runs in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import typer
from measuring import RESULTS, Results, cost_of, measure

ROOT = Path(__file__).resolve().parent.parent
MODEL = "gemma3_270m"
VARIANTS = [
    *(("coreml", weights) for weights in ("float32", "float16", "int8", "int4", "palettized4")),
    *(("coreai", weights) for weights in ("float32", "float16", "int8", "int4")),
]


def config_of(target: str, weights: str) -> Any:
    from exporter.config import load_config

    overrides = {"targets": [target], f"{target}.weights": weights, "max_context_length": 8192}
    return load_config(ROOT / "configs" / f"{MODEL}.yaml", overrides)


def export(target: str, weights: str, bundle: Path) -> dict[str, Any]:
    """`step_seconds` are those of each step of the export; converting is all of the back end's."""
    from exporter import pipeline
    from exporter.progress import Progress

    progress = Progress.silent()
    cost = cost_of(lambda: pipeline.export(config_of(target, weights), bundle, progress))
    from exporter.bundle import read_bundle

    manifest = read_bundle(bundle).manifest
    file = manifest.program.file
    sizes = {name: entry.bytes for name, entry in manifest.files.items() if name.startswith(f"{file}/")}
    return {**cost, "step_seconds": progress.seconds, "file_bytes": sum(sizes.values())}


def convert(target: str, weights: str, bundle: Path) -> dict[str, Any]:
    """The back end alone: from the float32 decoder to the checked file. The peak is that of the process, with the
    decoder and the libraries."""
    from exporter.backends import build_module
    from exporter.progress import Progress, peak_memory_bytes
    from exporter.source import open_source, target_decoder

    progress = Progress.silent()
    source = open_source(config_of(target, weights))
    format = source.config.targets[0]
    decoder = target_decoder(source, format, progress)
    with tempfile.TemporaryDirectory(dir=bundle.parent) as folder:
        start = time.process_time()
        options, recipe = source.config.options(format), source.recipe(format)
        build_module(format).build(decoder, source.limits, options, recipe, directory=Path(folder), step=progress.step)
        return {"cpu_seconds": time.process_time() - start, "peak_bytes": peak_memory_bytes()}


def describe(target: str, weights: str, bundle: Path) -> dict[str, Any]:
    from exporter.backends import description_module, file_module
    from exporter.bundle import read_bundle

    program = read_bundle(bundle).manifest.program
    file = file_module(program.format).read_file(bundle / program.file)
    found = description_module(program.format).describe(file)
    return {
        "weight_bytes": found.weight_bytes,
        "operators": {f.name: sum(f.operators.values()) for f in found.functions},
    }


def verify(target: str, weights: str, bundle: Path) -> dict[str, Any]:
    from exporter import pipeline
    from exporter.progress import Progress

    progress = Progress.silent()
    comparisons = pipeline.verify_bundle(bundle, config_of(target, weights), progress)
    return {"comparisons": [c.model_dump() for c in comparisons], "step_seconds": progress.seconds}


def decode(target: str, weights: str, bundle: Path) -> dict[str, Any]:
    """Tokens a second here, by the interpreter or the evaluator: what a device does is another matter."""
    import runtime_ref

    start = time.perf_counter()
    session = runtime_ref.load(bundle, verify_files=False)
    loaded = time.perf_counter()
    session.prefill([5 + i % 1000 for i in range(128)])
    prefilled = time.perf_counter()
    for token in range(20):
        session.decode(100 + token)
    end = time.perf_counter()
    return {"load_seconds": loaded - start, "prefill_128": 128 / (prefilled - loaded), "decode": 20 / (end - prefilled)}


def main(
    out: Path = RESULTS / "apple-models.json",
    bundles: Path = ROOT / "bundles" / "apple",
    variants: str = ",".join(map("/".join, VARIANTS)),
    keep: bool = typer.Option(False, help="Reuse bundles and measurements that are there already."),
) -> None:
    """Export, describe, verify and time every variant; the JSON is written after each step."""
    from exporter.backends import traits

    results = Results(out, keep=keep)
    results.own["effort"] = {format: traits(format).effort._asdict() for format in ("coreml", "coreai")}
    for name in variants.split(","):
        target, weights = name.split("/")
        bundle = bundles / f"{MODEL}_{target}_{weights}"
        works = (export, convert, describe, decode, verify)
        measure(results, name, works, (target, weights), bundle, keep=keep)


if __name__ == "__main__":
    typer.run(main)
