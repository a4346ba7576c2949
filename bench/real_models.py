"""Measure both real models, float and quantised, into docs/results/real-models.json. Run by ``make real``.

Every measurement runs in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import typer
from measuring import RESULTS, Results, cost_of, measure
from peers.catalogue import MODELS

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
LONG_CONTEXT = {"gemma3_270m": 32768, "smollm2_135m": 8192}


def config_of(model: str, variant: str) -> Any:
    from exporter.config import load_config

    quantization, cache, global_cache = VARIANTS[variant]
    overrides = {"executorch.quantization": quantization, "cache.dtype": cache, "cache.global_dtype": global_cache}
    overrides["quality"] = "accept"  # whatever a preset comes to here is a result
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
    out: Path = RESULTS / "real-models.json",
    bundles: Path = ROOT / "bundles" / "real",
    models: str = ",".join(MODELS),
    variants: str = ",".join(VARIANTS),
    keep: bool = typer.Option(False, help="Reuse bundles and measurements that are there already."),
) -> None:
    """Export, verify and measure every variant; the JSON is written after each step."""
    from exporter.backends import traits

    results = Results(out, keep=keep)
    results.own["effort"] = traits("executorch").effort._asdict()
    for model in models.split(","):
        for variant in variants.split(","):
            name = f"{model}/{variant}"
            bundle = bundles / f"{model}_{variant}".replace(" ", "_")
            works = (export, verify, long_context)
            measure(results, name, works, (model, variant), bundle, keep=keep)


if __name__ == "__main__":
    typer.run(main)
