"""The section of docs/results.md that `bench/export_scaling.py` measures: what an export costs by the model's size."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from sections.common import Run, gb, mb, provenance, side_by_side

STEPS_OF = ("18", "1B")


def title(name: str) -> str:
    return f"270M, {name} layers" if name.isdigit() else name


def rest(row: Run) -> int:
    """The peak without what is held by construction: libraries, tokenizer, graphs."""
    return int(row["peak_bytes"] - row["held_bytes"])


def costs(run: Run) -> list[list[str]]:
    return [
        [
            title(name), f"{row['weights'] / 1e6:.0f}", mb(row["file_bytes"]), f"{row['cpu_seconds']:.0f}",
            gb(row["peak_bytes"]), gb(row["held_bytes"]), gb(rest(row)),
        ]
        for name, row in run["rows"].items()
    ]  # fmt: skip


def by_layer(run: Run) -> list[list[str]]:
    """Least squares over the models that differ in layers alone, and the slope from each to the next."""
    rows = []
    for what, key, unit in (("CPU seconds", "cpu_seconds", 1), ("peak MB", "peak_bytes", 1e6)):
        points = [(float(name), row[key] / unit) for name, row in run["rows"].items() if name.isdigit()]
        rise, start = statistics.linear_regression(*zip(*points, strict=True))
        between = [(y - before) / (x - n) for (n, before), (x, y) in itertools.pairwise(points)]
        rows.append([what, f"{start:.0f}", f"{rise:.1f}", f"{min(between):.1f} to {max(between):.1f}"])
    return rows


def steps(run: Run) -> list[list[str]]:
    found: dict[str, dict[str, Any]] = {}
    for name in STEPS_OF:
        for one in run["rows"].get(name, {"steps": ()})["steps"]:
            found.setdefault(one["step"], {})[name] = one
    rows = []
    for step, own in found.items():
        cells = [
            [f"{own[name]['cpu_seconds']:.1f}", gb(own[name]["VmRSS"]), gb(own[name]["RssAnon"])] if name in own
            else ["", "", ""]
            for name in STEPS_OF
        ]  # fmt: skip
        rows.append([step, *itertools.chain(*cells)])
    return rows


def large(run: Run) -> list[list[str]]:
    most = max(map(rest, run["rows"].values()))
    return [
        [one["name"], *(gb(one[key]) for key in ("weights", "table", "layer")), gb(one["held_bytes"] + most)]
        for one in run["large"]
    ]


def section(runs: Sequence[Run]) -> str:
    names = [f"{title(name)}: CPU s" for name in STEPS_OF]
    columns = ("step", names[0], "resident GB", "anonymous GB", names[1], "resident GB", "anonymous GB")
    return f"""## Cost of an export by model size

{provenance(runs)}

Reproduce: `make scaling`.

Random weights in the shapes of Gemma 3, bfloat16 safetensors, preset `{runs[0]["quantization"]}`, one process each. CPU
seconds and peak memory are the kernel's account of the process; neither depends on the values of the weights. `held` is
what must be in memory by construction, `rest` is the peak without it.

{side_by_side(runs, 1, ("model", "weights M", "file MB", "CPU s", "peak GB", "held GB", "rest GB"), costs)}

By layer, in the shape of the 270M: a straight line through the rows above, and its slope from row to row.

{side_by_side(runs, 1, ("", "without layers", "each layer", "from row to row"), by_layer)}

By step. `resident` is the largest resident set, sampled; what is not `anonymous` is pages of files, which the system
takes back when it needs memory.

{side_by_side(runs, 1, columns, steps)}

`held` is the larger of W + 4 (T + L) and 2 W bytes, for W weights in all, T in one table (embedding or head) and L in
one layer. Quantising holds every weight as an integer, and one table and one layer in float32; verification holds what
XNNPACK packed and, at most, the file's pages.

**An 8B model was not run.** The bound for its peak is `held`, what GPTQ holds at that width, and the largest `rest`:

{side_by_side(runs, 1, ("shape", "W, billions", "T, billions", "L, billions", "bound GB"), large)}
"""
