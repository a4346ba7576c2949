"""Measure Gemma 3 270M as Core ML and Core AI programs and write docs/apple-models.md. Run by ``make apple``.

Every measurement runs in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import typer
from measuring import cost_of, measure, table

ROOT = Path(__file__).resolve().parent.parent
MODEL = "gemma3_270m"
VARIANTS = [
    *(("coreml", weights) for weights in ("float32", "float16", "int8", "int4", "palettized4")),
    *(("coreai", weights) for weights in ("float32", "float16", "int8", "int4")),
]
NAMES = {"coreml": "Core ML", "coreai": "Core AI"}


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
    from exporter import pipeline
    from exporter.backends import backend
    from exporter.progress import Progress, peak_memory_bytes

    progress = Progress.silent()
    source = pipeline.open_source(config_of(target, weights))
    format = source.config.targets[0]
    decoder = pipeline.target_decoder(source, format, progress)
    with tempfile.TemporaryDirectory(dir=bundle.parent) as folder:
        start = time.process_time()
        backend(format).build(decoder, source.limits, source.config.options(format), Path(folder), progress.step)
        return {"cpu_seconds": time.process_time() - start, "peak_bytes": peak_memory_bytes()}


def describe(target: str, weights: str, bundle: Path) -> dict[str, Any]:
    from exporter.backends import self_describing
    from exporter.bundle import read_bundle

    program = read_bundle(bundle).manifest.program
    assert program.format != "executorch"
    back_end = self_describing(program.format)
    found = back_end.describe(back_end.read_file(bundle / program.file))
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
    out: Path = ROOT / "docs" / "apple-models.json",
    bundles: Path = ROOT / "bundles" / "apple",
    variants: str = ",".join(f"{target}/{weights}" for target, weights in VARIANTS),
    keep: bool = typer.Option(False, help="Reuse bundles and measurements that are there already."),
) -> None:
    """Export, describe, verify and time every variant; then write the JSON and the table beside it."""
    results: dict[str, Any] = json.loads(out.read_text()) if keep and out.exists() else {"rows": {}}
    for name in variants.split(","):
        target, weights = name.split("/")
        bundle = bundles / f"{MODEL}_{target}_{weights}"
        works = (export, convert, describe, decode, verify)
        measure(results, name, works, (target, weights), bundle, out=out, keep=keep)
    out.with_suffix(".md").write_text(markdown(results))


def markdown(results: dict[str, Any]) -> str:
    """The committed page."""
    from exporter import verification as v
    from exporter.spec import KEEP_INT8

    parity, exports, conversions, files, speed = [], [], [], [], []
    for target, weights in VARIANTS:
        row = results["rows"].get(f"{target}/{weights}", {})
        start = [NAMES[target], weights]
        for c in row.get("verify", {}).get("comparisons", []):
            if c["reference"] == v.RECORDED:
                continue
            nll = "" if c["nll"] is None else f"{c['nll']:.4f} ({c['nll'] - c['reference_nll']:+.4f})"
            parity.append(
                [
                    *start, c["reference"], str(c["positions"]), f"{c['max_abs_difference']:.2g}",
                    f"{c['mean_abs_difference']:.2g}", f"{c['mean_kl_divergence']:.2g}",
                    f"{c['argmax_agreement']:.1%}", c["greedy_agreement"] or "", nll,
                ]
            )  # fmt: skip
        if "export" in row:
            e = row["export"]
            steps = ", ".join(f"{step} {seconds:.0f}" for step, seconds in e["step_seconds"].items() if seconds >= 1)
            exports.append(
                [*start, f"{e['wall_seconds']:.0f}", f"{e['cpu_seconds']:.0f}", f"{e['peak_bytes'] / 1e6:.0f}", steps]
            )
        if "convert" in row:
            c = row["convert"]
            conversions.append([*start, f"{c['cpu_seconds']:.0f}", f"{c['peak_bytes'] / 1e6:.0f}"])
        if "describe" in row:
            total, weight_bytes = row["export"]["file_bytes"], sum(row["describe"]["weight_bytes"].values())
            kinds = ", ".join(f"{kind} {size / 1e6:.1f}" for kind, size in row["describe"]["weight_bytes"].items())
            shares = [f"{total / 1e6:.1f}", f"{weight_bytes / 1e6:.1f}", f"{total / weight_bytes:.3f}"]
            files.append([*start, *shares, kinds])
        if "decode" in row:
            t = row["decode"]
            speed.append([*start, f"{t['load_seconds']:.1f}", f"{t['prefill_128']:.0f}", f"{t['decode']:.1f}"])
    effort = v.EFFORT["coreml"]
    kept = "; ".join(f"`{weights}`: {', '.join(names)}" for weights, names in KEEP_INT8.items())
    return f"""# Gemma 3 270M in Apple's formats, measured on Linux

{results["date"]}, {results["machine"]}. Reproduce with `make apple`; the raw figures are in `apple-models.json`.
**Nothing here was run on a device.** The saved files were run on this machine: `.mlpackage` by the evaluator of
`runtime_ref/programs/mlpackage`, `.aimodel` by the CPU interpreter of Apple's own wheel. Context 8,192, prefill chunks
of up to 512 tokens. The options of 4 bits keep the matrices in int8 that they keep by default:
{kept}.

## Against the model

`eager` is the float32 decoder over the same calls (chunks of 1 to 512 tokens; float32 caches). `transformers` reads the
same GGUF in float32: {effort.tokens} tokens of English from Python's own documentation, in chunks (1: every token
through `main`), then {effort.greedy} greedy tokens of the reference, one by one. Differences are of logits; KL is that
of the program's next-token distribution from the reference's, NLL the mean over the text (Core AI, whose interpreter
takes over a second for a token: over the last {v.EFFORT["coreai"].tail} tokens, which go one by one), beside its
difference from the reference's.

{table(("format", "weights", "against", "positions", "max", "mean", "KL", "argmax", "greedy", "NLL"), parity)}

## Export

Everything from the checkpoint to the verified bundle, in one process; the steps' wall seconds behind it.

{table(("format", "weights", "wall s", "CPU s", "peak MB", "steps, s"), exports)}

Of that, the conversion: from the float32 decoder to the checked file, tracing included. The peak is that of a process
that does nothing else, the decoder (1073 MB) and the libraries in it.

{table(("format", "weights", "CPU s", "peak MB"), conversions)}

## Size

MB of the program as a whole, of its constants, their ratio, and the constants by precision.

{table(("format", "weights", "program", "constants", "ratio", "by precision"), files)}

## Speed of the check

Tokens a second here, for whoever wants to know how long `verify` takes. It says nothing about a phone.

{table(("format", "weights", "load s", "prefill of 128", "decode"), speed)}
"""


if __name__ == "__main__":
    typer.run(main)
