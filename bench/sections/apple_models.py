"""The section of docs/results.md that `bench/apple_models.py` measures: Gemma 3 270M in Apple's formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sections.common import Run, has, mb, provenance, side_by_side

NAMES = {"coreml": "Core ML", "coreai": "Core AI"}
ORDER = ("float32", "float16", "int8", "int4", "palettized4")
TRANSFORMERS, EAGER = "transformers, chunks of ", "eager"
"""References in the JSON, as `verify` names them."""


def started(run: Run) -> list[tuple[list[str], dict[str, Any]]]:
    """Every row of a run behind the names of its format and weights, in the order of the page."""
    found = [(name.split("/"), row) for name, row in run["rows"].items()]
    found.sort(key=lambda one: (list(NAMES).index(one[0][0]), ORDER.index(one[0][1])))
    return [([NAMES[format], weights], row) for (format, weights), row in found]


def accuracy(run: Run) -> list[list[str]]:
    """Against Transformers in the shortest chunks that were run, those whose NLL was taken."""
    rows = []
    for start, row in started(run):
        if not has(row, "verify"):
            continue
        named = {c["reference"]: c for c in row["verify"]["comparisons"]}
        (c,) = [c for name, c in named.items() if name.startswith(TRANSFORMERS) and c["nll"] is not None]
        rows.append(
            [
                *start, f"{c['max_abs_difference']:.2g}", f"{c['mean_abs_difference']:.2g}",
                f"{c['argmax_agreement']:.1%}", c["greedy_agreement"], f"{c['nll']:.4f}",
                f"{c['nll'] - c['reference_nll']:+.4f}", f"{c['mean_kl_divergence']:.2g}",
                f"{named[EAGER]['mean_kl_divergence']:.2g}",
            ]
        )  # fmt: skip
    return rows


def costs(run: Run) -> list[list[str]]:
    rows = []
    for start, row in started(run):
        if not has(row, "export", "convert", "describe", "decode"):
            continue
        export, convert, decode = row["export"], row["convert"], row["decode"]
        constants = sum(row["describe"]["weight_bytes"].values())
        rows.append(
            [
                *start, f"{export['file_bytes'] / 1e6:.1f}", f"{constants / 1e6:.1f}", f"{export['cpu_seconds']:.0f}",
                mb(export["peak_bytes"]), f"{convert['cpu_seconds']:.0f}", mb(convert["peak_bytes"]),
                f"{decode['prefill_128']:.0f}", f"{decode['decode']:.1f}",
            ]
        )  # fmt: skip
    return rows


def section(runs: Sequence[Run]) -> str:
    core_ml, core_ai = runs[0]["effort"]["coreml"], runs[0]["effort"]["coreai"]
    return f"""## Core ML and Core AI: Gemma 3 270M

{provenance(runs)}

Reproduce: `make apple`.

**Run on Linux, not on an Apple device.** The saved `.mlpackage` is executed by our
[evaluator](mlpackage-evaluator.md), the `.aimodel` by the CPU interpreter of Apple's wheel. Context 8,192, chunks of up
to 512. Columns as above.

- Core ML: {core_ml["tokens"]} tokens of English through `main` one by one, then {core_ml["greedy"]} greedy tokens.
- Core AI, whose interpreter takes over a second a token: the same text, of which only the last {core_ai["tail"]} tokens
  one by one. Its NLL is over those, so the NLLs of the two formats do not compare.
- `KL from eager`: the file against the eager model with the same weights, that is what conversion alone costs, float16
  arithmetic included.

{side_by_side(runs, 2, ("format", "weights", "max", "mean", "argmax", "greedy", "NLL", "from float32", "KL",
                        "KL from eager"), accuracy)}

`int4` and `palettized4` keep some matrices in int8 ([coreml.md](coreml.md#weights)).

`export` is everything from the checkpoint to the verified bundle; `convert` only from the float32 decoder to the
checked file. `prefill` and `decode` are tokens a second of the check on this machine; they say nothing about a phone.

{side_by_side(runs, 2, ("format", "weights", "program MB", "of it constants", "export CPU s", "peak MB",
                        "convert CPU s", "peak MB", "prefill 128", "decode"), costs)}
"""  # fmt: skip
