"""LEAF: the table of a program's scores, domain by domain."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from exporter.spec import DomainScore, Quality


def quality_table(title: str, scores: Sequence[DomainScore]) -> Table:
    """A row for each domain."""
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("text", overflow="fold")
    for column in ("tokens", "NLL", "NLL gap", "mean KL", "99% KL", "same first choice"):
        table.add_column(column, justify="right")
    for one in scores:
        table.add_row(
            one.domain, str(one.positions), f"{one.nll:.3f}", f"{one.nll_gap:+.4f} ± {one.nll_gap_error:.4f}",
            f"{one.kl:.4f} ± {one.kl_error:.4f}", f"{one.kl_p99:.3f}", f"{one.agreement:.1%}",
        )  # fmt: skip
    return table


def recorded_table(format: str, quality: Quality) -> Table:
    """What was seen at export, under the promise."""
    promise, own = quality.promise, quality.own_text
    kept = "broken, and accepted" if quality.accepted else "kept"
    title = (
        f"quality of {format} beside the float model; {quality.preset} promises KL <= {promise.kl:g} and NLL gap <= "
        f"{promise.nll:g} nats on every text: {kept}"
    )
    return quality_table(title, [*quality.domains, *([own] if own else [])])
