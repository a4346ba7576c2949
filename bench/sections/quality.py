"""The section of docs/results.md that `bench/quality.py` measures: predictions beside float32's, text by text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from peers.catalogue import MODELS
from sections.common import Run, mb, provenance, side_by_side


def worst(row: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = max(row["domains"], key=lambda one: float(one[key]))
    return found


def summary(run: Run) -> list[list[str]]:
    rows = []
    for model, bundles in run["models"].items():
        for name, row in bundles.items():
            kl, gap = worst(row, "kl"), worst(row, "nll_gap")
            mean = sum(one["kl"] for one in row["domains"]) / len(row["domains"])
            rows.append([
                MODELS[model], name, f"{mean:.4f}", f"{kl['kl']:.4f} ± {kl['kl_error']:.4f}, {kl['domain']}",
                f"{gap['nll_gap']:+.4f} ± {gap['nll_gap_error']:.4f}, {gap['domain']}", mb(row["file_bytes"]),
            ])  # fmt: skip
    return rows


def by_text(run: Run) -> list[list[str]]:
    return [
        [
            MODELS[model], name, one["domain"], str(one["positions"]), f"{one['nll']:.3f}",
            f"{one['nll_gap']:+.4f} ± {one['nll_gap_error']:.4f}", f"{one['kl']:.4f} ± {one['kl_error']:.4f}",
            f"{one['kl_p99']:.3f}", f"{one['agreement']:.1%}",
        ]
        for model, bundles in run["models"].items()
        for name, row in bundles.items()
        for one in row["domains"]
    ]  # fmt: skip


SUMMARY = ("", "bundle", "mean KL", "worst text's KL", "worst text's NLL gap", "file MB")
BY_TEXT = ("", "bundle", "text", "tokens", "NLL", "NLL gap", "mean KL", "99% KL", "same first choice")


def section(runs: Sequence[Run]) -> str:
    count = max(run["positions"] for run in runs)
    return f"""## Quality on every text

{provenance(runs)}

Reproduce: `make quality`. The `.pte`, up to {count:,} tokens of each text one by one through `main`, beside
Transformers in float32 on the same checkpoint. The texts, and what the presets promise: [quality.md](quality.md). KL
divergence and NLL gap in nats, each with its standard error.

{side_by_side(runs, 2, SUMMARY, summary)}

Text by text:

{side_by_side(runs, 3, BY_TEXT, by_text)}
"""
