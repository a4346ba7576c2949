"""The tables the command line prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from exporter.describe import FileDescription
from exporter.plan import ContextPlan, KindGrowth
from exporter.quality.table import recorded_table
from exporter.spec import KINDS, CheckResult, Comparison, Manifest, ModelSpec
from exporter.units import BINARY, DECIMAL, amount, size


def _table(title: str, columns: Sequence[str], left: int = 1) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", overflow="fold")
    return table


_MIXER_COLUMNS = ("window", "heads", "KV heads", "head_dim", "RoPE base")


def layers_table(model: ModelSpec) -> Table:
    """Runs of equal layers share a row."""
    table = _table("layers", ("layers", "kind", *_MIXER_COLUMNS, "MLP"), left=2)
    start = 0
    for index, layer in enumerate(model.layers):
        following = model.layers[index + 1] if index + 1 < len(model.layers) else None
        if following != layer:
            name = str(start) if start == index else f"{start}-{index}"
            facts = layer.mixer.facts()
            cells = [facts.get(column, "-") for column in _MIXER_COLUMNS]
            table.add_row(name, layer.mixer.kind, *cells, layer.feed_forward.in_words())
            start = index + 1
    return table


def _in_mib(count: int) -> str:
    return amount(count, "MiB")


def plan_table(plans: Sequence[ContextPlan], units: str = "in MiB", show: Callable[[int], str] = _in_mib) -> Table:
    """State by context; `show` turns bytes into the text of a cell, `units` says in the title what it does."""
    kinds = [k.label for k in KINDS.values() if k.listed or any(plan.kinds[k.label] for plan in plans)]
    table = _table(f"state {units} at context length", ("context", *kinds, "total", "full caches", "ratio"))
    for plan in plans:
        cells = [show(count) for count in (*map(plan.kinds.__getitem__, kinds), plan.total, plan.full)]
        table.add_row(str(plan.context), *cells, f"{plan.full / plan.total:.2f}x" if plan.total else "-")
    return table


def plan_tables(plans: Sequence[ContextPlan]) -> tuple[Table, Table]:
    """State by context in binary units, and the same in decimal ones."""
    return (
        plan_table(plans, "in binary units (1 GiB = 2^30 bytes)", lambda count: size(count, BINARY)),
        plan_table(plans, "in decimal units (1 GB = 10^9 bytes)", lambda count: size(count, DECIMAL)),
    )


def growth_table(growths: Sequence[KindGrowth], layers: int) -> Table:
    """What a token adds, by kind of layer and to all `layers` of the model."""
    columns = ("kind", "layers", "full caches", "", "rings", "")
    table = _table("growth a token (1 KiB = 2^10 bytes, 1 KB = 10^3 bytes)", columns)
    total = (sum(growth.full for growth in growths), sum(growth.ring for growth in growths))
    rows = [(growth.kind, growth.layers, growth.full, growth.ring) for growth in growths]
    for kind, count, *values in [*rows, ("all", layers, *total)]:
        cells = [size(value, units) for value in values for units in (BINARY, DECIMAL)]
        table.add_row(kind, str(count), *cells)
    return table


def description_tables(file: FileDescription) -> list[Table]:
    """What a file says of itself: inputs, states and outputs of every function, its operators, its weights."""
    values = _table(
        f"{file.file}, {file.format} program, {file.file_bytes:,} bytes", ("function", "", "name", "dtype", "shape"), 5
    )
    operators = _table("operators", ("function", "operators"), left=2)
    for function in file.functions:
        for what, rows in (("input", function.inputs), ("state", function.states), ("output", function.outputs)):
            for row in rows:
                values.add_row(function.name, what, *row)
        counts = sorted(function.operators.items(), key=lambda item: (-item[1], item[0]))
        operators.add_row(function.name, ", ".join(f"{name} {count}" for name, count in counts))
    weights = _table("bytes", ("", "bytes"))
    for precision, count in file.weight_bytes.items():
        weights.add_row(precision, f"{count:,}")
    for function in file.functions:
        if function.planned_bytes is not None:
            weights.add_row(f"{function.name}, planned beside the states", f"{function.planned_bytes:,}")
    return [values, operators, weights]


def checks_table(checks: Sequence[CheckResult]) -> Table:
    table = _table("graph checks", ("format", "program", "check", "", "evidence"), left=5)
    for check in checks:
        outcome = "ok" if check.passed else "FAILED" if check.refused else "warning"
        table.add_row(check.format, check.program, check.name, outcome, check.evidence)
    return table


def warnings(manifest: Manifest) -> list[str]:
    """What an export says of a bundle that it does not refuse."""
    checks = [check for check in manifest.graph_checks if not check.passed]
    lines = [f"{check.format}, {check.program}: {check.name}: {check.evidence}" for check in checks]
    lines += [
        f"{own.format}: breaks the promise of {own.quality.preset}: {'; '.join(own.quality.broken)}"
        for own in manifest.programs
        if own.quality is not None and own.quality.accepted
    ]
    if manifest.not_compared is not None:
        lines.append(f"not compared with Transformers: {manifest.not_compared}")
    return lines


def comparisons_table(comparisons: Sequence[Comparison]) -> Table:
    columns = (
        "format",
        "against",
        "positions",
        "max |d|",
        "mean |d|",
        "KL",
        "argmax",
        "greedy",
        "state |d|",
        "state error",
        "NLL",
        "NLL of ref.",
    )
    table = _table("verification", columns, left=2)
    for c in comparisons:
        optional = [c.max_state_difference, c.max_state_error, c.nll, c.reference_nll]
        rest = ["" if value is None else f"{value:.4g}" for value in optional]
        table.add_row(
            c.format or "float model", c.reference, str(c.positions), f"{c.max_abs_difference:.2e}",
            f"{c.mean_abs_difference:.2e}", f"{c.mean_kl_divergence:.2e}", f"{c.argmax_agreement:.2%}",
            c.greedy_agreement or "", *rest,
        )  # fmt: skip
    return table


def quality_tables(manifest: Manifest) -> list[Table]:
    """What was seen of each program beside the float model on texts of several domains, where that was asked."""
    return [recorded_table(own.format, own.quality) for own in manifest.programs if own.quality is not None]


def bundle_table(manifest: Manifest) -> Table:
    table = _table(f"bundle {manifest.name}", ("", ""), left=2)
    source, model = manifest.source, manifest.model
    rows = {
        "created": manifest.created,
        "source": f"{source.name} ({source.kind}), licence: {source.license or 'not stated'}",
        "model": f"{model.family}, {len(model.layers)} layers, vocabulary {model.vocab_size}",
        "context / prefill chunk": f"{manifest.max_context_length} / {manifest.max_prefill_chunk}",
        "weights": "; ".join(f"{program.format}: {program.weights}" for program in manifest.programs),
        "Transformers": f"not compared: {manifest.not_compared}" if manifest.not_compared else "compared at export",
        "cache": f"{manifest.cache.caches}, growth: {manifest.cache.growth}, ring slack: {manifest.cache.ring_slack}",
        "versions": ", ".join(f"{name} {number}" for name, number in manifest.versions.items()),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    for name, entry in manifest.files.items():
        table.add_row(name, f"{entry.bytes:,} bytes, sha256 {entry.sha256[:16]}…")
    return table


def operators_table(manifest: Manifest) -> Table:
    table = _table("programs", ("program", "runtime", "operators (.pte: outside delegates)"), left=3)
    for program in manifest.programs:
        methods = ", ".join(program.methods)
        table.add_row(f"{program.file}: {methods}", program.runtime, ", ".join(program.operators))
    return table
