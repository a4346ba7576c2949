"""Measure both real models, float and quantised, and write docs/real-models.md. Run by ``make real``.

Every measurement runs in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import typer
from measuring import cost_of, measure, table

from exporter.machine import resident_bytes
from exporter.quiet import native_stderr_hidden

ROOT = Path(__file__).resolve().parent.parent
INT8_CACHE = " over int8 caches"
VARIANTS = {
    "float32": ("none", "float32", None), "accurate": ("accurate", "float16", None),
    "balanced": ("balanced", "float16", "int8"), "small": ("small", "float16", None),
    f"float32{INT8_CACHE}": ("none", "int8", None), f"accurate{INT8_CACHE}": ("accurate", "int8", None),
}  # fmt: skip
"""The preset of the weights, the dtype of the caches and that of global layers where it is another."""
MODELS = {"gemma3_270m": "Gemma 3 270M", "smollm2_135m": "SmolLM2 135M Instruct"}
LONG_CONTEXT = {"gemma3_270m": 32768, "smollm2_135m": 8192}


def config_of(model: str, variant: str) -> Any:
    from exporter.config import load_config

    quantization, cache, global_cache = VARIANTS[variant]
    overrides = {"quantization": quantization, "cache.dtype": cache, "cache.global_dtype": global_cache}
    return load_config(ROOT / "configs" / f"{model}.yaml", overrides)


def export(model: str, variant: str, bundle: Path) -> dict[str, Any]:
    from exporter import pipeline
    from exporter.progress import Progress

    cost = cost_of(lambda: pipeline.export(config_of(model, variant), bundle, Progress.silent()))
    return {**cost, "file_bytes": (bundle / "model.pte").stat().st_size}


def verify(model: str, variant: str, bundle: Path) -> dict[str, Any]:
    from exporter import pipeline
    from exporter.progress import Progress

    comparisons = pipeline.verify_bundle(bundle, config_of(model, variant), Progress.silent())
    return {"comparisons": [comparison.model_dump() for comparison in comparisons]}


def long_context(model: str, variant: str, bundle: Path) -> dict[str, Any]:
    """Resident memory with the program loaded, and with the whole context in the cache."""
    import runtime_ref

    with native_stderr_hidden():
        bare = resident_bytes()
        session = runtime_ref.load(bundle, verify_files=False)
    context = LONG_CONTEXT[model]
    session.prefill([5 + i % 1000 for i in range(1024)])
    loaded = resident_bytes()
    session.reset()
    start = time.perf_counter()
    session.prefill([5 + i % 1000 for i in range(context)])
    states = session.manifest.states
    return {
        "context": context,
        "bare_bytes": bare,
        "loaded_bytes": loaded,
        "full_context_bytes": resident_bytes(),
        "prefill_seconds": time.perf_counter() - start,
        "state_bytes": sum(tensor.nbytes for tensor in session.state.tensors),
        "ring_rows": sorted(
            {t.shape[1] for s, t in zip(states, session.state.tensors, strict=True) if s.kind == "ring"}
        ),
        "full_caches_bytes": sum(state.bytes(context) for state in states),
    }


def main(
    out: Path = ROOT / "docs" / "real-models.json",
    bundles: Path = ROOT / "bundles" / "real",
    models: str = ",".join(MODELS),
    variants: str = ",".join(VARIANTS),
    keep: bool = typer.Option(False, help="Reuse bundles and measurements that are there already."),
) -> None:
    """Export, verify and measure every variant; then write the JSON and the table beside it."""
    results: dict[str, Any] = json.loads(out.read_text()) if keep and out.exists() else {"rows": {}}
    for model in models.split(","):
        for variant in variants.split(","):
            name = f"{model}/{variant}"
            bundle = bundles / f"{model}_{variant}".replace(" ", "_")
            works = (export, verify, long_context)
            measure(results, name, works, (model, variant), bundle, out=out, keep=keep)
    out.with_suffix(".md").write_text(markdown(results))


def mib(size: int) -> str:
    return f"{size / 2**20:.0f}"


def markdown(results: dict[str, Any]) -> str:
    """The committed page."""
    from exporter import verification as v

    effort = v.EFFORT["executorch"]
    parity, quality, exports, memory = [], [], [], []
    for name, row in results["rows"].items():
        model, variant = name.split("/")
        start = [MODELS[model], variant]
        named = {c["reference"]: c for c in row["verify"]["comparisons"]}
        for reference, c in named.items():
            if reference.startswith(v.TRANSFORMERS):
                differences = [f"{c['max_abs_difference']:.1e}", f"{c['mean_abs_difference']:.1e}"]
                chunk, argmax = reference.split()[-1], f"{c['argmax_agreement']:.1%}"
                parity.append([*start, chunk, str(c["positions"]), *differences, c["greedy_agreement"], argmax])
        one = named[f"{v.TRANSFORMERS}, chunks of 1"]
        eager, program = named.get(v.BASELINE), named.get(v.FLOAT, named[v.EAGER])
        nlls = [f"{one['nll']:.4f}", f"{one['reference_nll']:.4f}", f"{one['nll'] - one['reference_nll']:+.4f}"]
        divergence = "" if eager is None else f"{eager['mean_kl_divergence']:.2g}"
        quality.append([*start, *nlls, divergence, f"{program['mean_kl_divergence']:.2g}"])
        e = row["export"]
        sizes = [f"{e['peak_bytes'] / 1e6:.0f}", f"{e['file_bytes'] / 1e6:.0f}"]
        exports.append([*start, f"{e['wall_seconds']:.0f}", f"{e['cpu_seconds']:.0f}", *sizes])
        if "long_context" in row:
            m = row["long_context"]
            rings = ", ".join(str(rows) for rows in m["ring_rows"]) or "none"
            keys = ("state_bytes", "full_caches_bytes", "bare_bytes", "loaded_bytes", "full_context_bytes")
            memory.append([*start, str(m["context"]), rings, *(mib(m[key]) for key in keys)])
    return f"""# The two real models, measured

{results["date"]}, {results["machine"]}. Reproduce with `make real`; the raw figures are in
`real-models.json`. The text is English prose from Python's own documentation; the reference is Transformers in float32,
eager attention, reading the same GGUF. Nothing here was run on a device. Weights: the presets of
[quantization.md](quantization.md), over float16 caches; `accurate` is the shipped config, and `balanced` that of
`configs/gemma3_270m_balanced.yaml`, whose global layers have int8 caches.

## Against Transformers

{effort.tokens} tokens of prompt in chunks (1: every token through `main`), then {effort.greedy} greedy tokens of the
reference, one by one. Positions are those whose logits a program produced; differences are of logits.

{table(("model", "weights", "chunk", "positions", "max", "mean", "greedy", "argmax"), parity)}

## Likelihood of the same text, and distance from float

NLL is the mean over every token, each through `main`. `KL of eager` is what quantisation itself costs, measured on the
eager decoder over the calls of `verify`; `KL of program` is the shipped file's own distance from the float model.

{table(("model", "weights", "NLL", "Transformers fp32", "difference", "KL of eager", "KL of program"), quality)}

## Export

Everything from the checkpoint to the verified bundle, in one process. CPU seconds count: other work ran beside the wall
clock.

{table(("model", "weights", "wall s", "CPU s", "peak MB", "program MB"), exports)}

## Memory at a full context

`state` is what the caches hold, `full caches` what they would hold if every layer kept every row. The last three are
the resident set in MiB of the whole process: with torch and runtime_ref imported, with program and 1,024 tokens,
and with the whole context in the caches.

{table(("model", "weights", "context", "ring rows", "state MiB", "full caches MiB", "bare", "loaded", "full"), memory)}
"""


if __name__ == "__main__":
    typer.run(main)
