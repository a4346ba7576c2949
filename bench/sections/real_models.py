"""The sections of docs/results.md that `bench/real_models.py` measures: the ``.pte`` of both real models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peers.catalogue import MODELS
from sections.common import Run, has, mb, provenance, side_by_side

TRANSFORMERS, QUANTIZATION = "transformers, chunks of ", "(eager against float eager)"
FROM_FLOAT = ("float eager", "eager")
"""References in the JSON, as `verify` names them. A program that rounds nothing has only its eager model, the float
model itself."""


def greedy(comparisons: Sequence[Run]) -> str:
    """``62 to 64 of 64``: how many tokens agree, from the worst to the best."""
    found = sorted(int(c["greedy_agreement"].split()[0]) for c in comparisons)
    total = comparisons[0]["greedy_agreement"].split()[-1]
    return f"{found[0]} of {total}" if found[0] == found[-1] else f"{found[0]} to {found[-1]} of {total}"


def started(run: Run) -> list[tuple[list[str], dict[str, Any]]]:
    """Every row of a run behind the names of its model and weights."""
    return [([MODELS[name.split("/")[0]], name.split("/")[1]], row) for name, row in run["rows"].items()]


def accuracy(run: Run) -> list[list[str]]:
    rows = []
    for start, row in started(run):
        if not has(row, "verify"):
            continue
        named = {c["reference"]: c for c in row["verify"]["comparisons"]}
        chunks = [c for reference, c in named.items() if reference.startswith(TRANSFORMERS)]
        one = named[f"{TRANSFORMERS}1"]
        program = next(named[reference] for reference in FROM_FLOAT if reference in named)
        alone = named.get(QUANTIZATION)
        rows.append(
            [
                *start, f"{max(c['max_abs_difference'] for c in chunks):.2g}",
                f"{max(c['mean_abs_difference'] for c in chunks):.2g}",
                f"{min(c['argmax_agreement'] for c in chunks):.1%}", greedy(chunks), f"{one['nll']:.4f}",
                f"{one['nll'] - one['reference_nll']:+.4f}", f"{program['mean_kl_divergence']:.2g}",
                "" if alone is None else f"{alone['mean_kl_divergence']:.2g}",
            ]
        )  # fmt: skip
    return rows


def exports(run: Run) -> list[list[str]]:
    return [
        [
            *start,
            mb(row["export"]["file_bytes"]),
            f"{row['export']['cpu_seconds']:.0f}",
            mb(row["export"]["peak_bytes"]),
        ]
        for start, row in started(run)
        if has(row, "export")
    ]


def memory(run: Run) -> list[list[str]]:
    keys = ("state_bytes", "full_caches_bytes", "bare_bytes", "loaded_bytes", "full_context_bytes")
    rows = []
    for start, row in started(run):
        if has(row, "long_context"):
            m = row["long_context"]
            rings = ", ".join(map(str, m["ring_rows"])) or "none"
            rows.append([*start, f"{m['context']:,}", rings, *(f"{m[key] / 2**20:.0f}" for key in keys)])
    return rows


def section(runs: Sequence[Run]) -> str:
    effort = runs[0]["effort"]
    *chunks, longest = (str(chunk) for chunk in effort["chunks"])
    return f"""## ExecuTorch: accuracy

{provenance(runs)}

Reproduce: `make real`.

The `.pte` against Transformers in float32 on the same weights, dequantised from the GGUF: {effort["tokens"]:,} tokens
of English, then {effort["greedy"]} greedy tokens of the reference.

- The text is prefilled in chunks of {", ".join(chunks)} and {longest}; chunks of 1 send every token through `main`.
- `max` and `mean` (difference of logits) and `argmax` (same first choice) are the worst over these chunk lengths;
  `greedy` (same token) is the worst and the best.
- NLL, and its difference from the float32 reference, is that of chunks of 1.
- `KL`: divergence of the file from the float model, in nats, over the few positions that `verify` compares. `KL of
  quantisation`: that of the quantised eager model, over the same positions.

{side_by_side(runs, 2, ("model", "weights", "max", "mean", "argmax", "greedy", "NLL", "from float32", "KL",
                        "KL of quantisation"), accuracy)}

- `accurate`, `balanced` and `small` are the presets of [quantization.md](quantization.md), over float16 caches;
  `balanced` has int8 caches in its global layers.
- The GGUFs hold 4-bit to 8-bit weights. A preset with int4 quantises them a second time, onto another grid.

### Cost of these exports

From the checkpoint to the verified bundle, one process each.

{side_by_side(runs, 2, ("model", "weights", "file MB", "CPU s", "peak MB"), exports)}

## ExecuTorch: memory with a full context

The same run. `state` is what the caches hold; `full caches` is what they would hold if every layer kept every row. The
last three columns are the resident memory of the whole process: before loading (interpreter and libraries), with the
program and 1,024 tokens, with the whole context in the caches.

{side_by_side(runs, 2, ("model", "weights", "context", "ring rows", "state MiB", "full caches MiB", "before MiB",
                        "loaded MiB", "full MiB"), memory)}
"""  # fmt: skip
