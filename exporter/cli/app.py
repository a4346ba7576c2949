"""The command line: ``python -m exporter export | plan | inspect | verify``."""

from __future__ import annotations

import contextlib
import enum
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.pretty import Pretty

from exporter.config import load_config
from exporter.console import messages, results, run, say
from exporter.errors import ConfigError
from exporter.quiet import native_stderr_hidden
from exporter.tricks.rare_collections import rare_collections
from exporter.units import in_unit
from exporter.yaml_text import parse_yaml

app = typer.Typer(
    name="exporter",
    help="Export decoder language models to programs that run on phones, each run and compared here first.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
output = results()

ModelOption = Annotated[
    Path, typer.Option("--model", help="The YAML file of the export, e.g. configs/gemma3_270m.yaml.")
]
BundleArgument = Annotated[Path, typer.Argument(help="A bundle directory.")]


class OutputFormat(enum.StrEnum):
    TABLE = "table"
    JSON = "json"


@app.command()
def export(
    model: ModelOption,
    out: Annotated[Path | None, typer.Option(help="Where to write the bundle (default: bundles/NAME).")] = None,
    dry_run: Annotated[bool, typer.Option(help="Print config, layers and memory plan; trace nothing.")] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override a key of the YAML, e.g. --set executorch.quantization=balanced."),
    ] = None,
) -> None:
    """Write a bundle: the program, its tokenizer and a manifest, verified against the model it came from."""
    config = load_config(model, parse_overrides(overrides))
    # torch and ExecuTorch take seconds: a bad YAML should not wait for them
    with rare_collections(), native_stderr_hidden():
        from exporter import pipeline
        from exporter.cli import tables
        from exporter.source import open_source
    from exporter.plan import model_states, plan_contexts
    from exporter.progress import Progress

    if dry_run:
        source = open_source(config)
        output.print(Pretty(source.config.model_dump(mode="json"), expand_all=True))
        output.print(tables.layers_table(source.checkpoint.spec))
        states = model_states(source.checkpoint.spec, source.config.cache)
        output.print(tables.plan_table(plan_contexts(states, source.limits.max_context_length)))
        return
    target = Path("bundles") / config.name if out is None else out
    bundle = pipeline.export(config, target, Progress(messages()))
    output.print(tables.comparisons_table(bundle.manifest.verification))
    for table in tables.quality_tables(bundle.manifest):
        output.print(table)
    for line in tables.warnings(bundle.manifest):
        say("warning", line, "bold yellow")
    total = sum(entry.bytes for entry in bundle.manifest.files.values())
    size = in_unit(total, "MB", 0)
    output.print(f"{target}: {size}, licence of the weights: {bundle.manifest.source.license}", soft_wrap=True)


@app.command()
def plan(
    model: Annotated[
        Path,
        typer.Option(help="The YAML file of an export, or an architecture such as configs/architectures/inkling.yaml."),
    ],
    contexts: Annotated[
        str | None, typer.Option(help="Context lengths, e.g. 8192,32768,131072; the usual ones if not given.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw it: a PNG file to write.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key of the YAML, e.g. --set cache.dtype=int8.")
    ] = None,
) -> None:
    """Print what the caches of a model will cost, full and as rings; nothing is exported and no weights are read."""
    from exporter.architecture import read_planned
    from exporter.cli import tables
    from exporter.cli.plot import check_plot_path, write_plot
    from exporter.lengths import parse_lengths
    from exporter.plan import check_contexts, growths, plan_contexts

    asked = None if contexts is None else parse_lengths("--contexts", contexts)
    if plot is not None:
        check_plot_path(plot)
    planned = read_planned(model, parse_overrides(overrides))
    check_contexts(asked or (), planned.max_context)
    plans = plan_contexts(planned.states, planned.usual_context, asked)
    if plot is not None:
        write_plot(plot, planned.title, planned.states, [each.context for each in plans])
    output.print(planned.title)
    for table in tables.plan_tables(plans):
        output.print(table)
    output.print(tables.growth_table(growths(planned.states), planned.layers))
    if plot is not None:
        output.print(f"wrote {plot}", soft_wrap=True)


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="A bundle, or one program: .mlpackage, .aimodel, .pte (with --check).")],
    check: Annotated[Path | None, typer.Option(help="A contract (YAML, docs/graph-contract.md) to hold it to.")] = None,
    output_format: Annotated[
        OutputFormat, typer.Option("--format", help="Tables, or JSON for a machine.")
    ] = OutputFormat.TABLE,
) -> None:
    """Print what a bundle is and every graph check, run again on the program file; exit with 1 if one fails."""
    with native_stderr_hidden():
        from exporter import inspection
        from exporter.cli import tables
        from exporter.graph.contract_file import load_contract

    inspected = inspection.inspect(file, None if check is None else load_contract(check))
    if output_format is OutputFormat.JSON:
        typer.echo(json.dumps(inspected.as_json(), indent=2))
    elif inspected.manifest is None:
        for description in inspected.descriptions:
            for table in tables.description_tables(description):
                output.print(table)
        if inspected.checks:
            output.print(tables.checks_table(inspected.checks))
    else:
        output.print(tables.bundle_table(inspected.manifest))
        output.print(tables.layers_table(inspected.manifest.model))
        output.print(tables.operators_table(inspected.manifest))
        output.print(tables.checks_table(inspected.checks))
        output.print(tables.comparisons_table(inspected.manifest.verification))
        for table in tables.quality_tables(inspected.manifest):
            output.print(table)
    if not inspected.passed:
        raise typer.Exit(1)


@app.command()
def verify(
    bundle: BundleArgument,
    model: Annotated[
        Path | None, typer.Option(help="The YAML it was exported with: also compare with eager and Transformers.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="The overrides it was exported with.")] = None,
) -> None:
    """Run the program that ships and compare it with the model it came from."""
    config = None if model is None else load_config(model, parse_overrides(overrides))
    with native_stderr_hidden():
        from exporter import pipeline
        from exporter.cli import tables
    from exporter.progress import Progress

    output.print(tables.comparisons_table(pipeline.verify_bundle(bundle, config, Progress(messages()))))


def parse_overrides(pairs: list[str] | None) -> dict[str, Any]:
    """``a.b=value`` to ``{"a.b": value}``, the value read as YAML.

    Raises:
        ConfigError: no ``=`` in a pair, or a value that is no YAML.
    """
    result: dict[str, Any] = {}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(
                "--set", got=repr(pair), expected="KEY=VALUE", repair="Write e.g. max_context_length=4096."
            )
        try:
            result[key] = parse_yaml(value)
        except ValueError as error:
            raise ConfigError(
                f"--set {key}",
                got=f"{value!r}, which is no YAML ({error})",
                expected="a YAML value",
                repair=f"Quote a text twice: --set {key}='\"...\"'.",
            ) from error
    return result


def _exit_by_signal(number: int, _: object) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def signals_that_clean_up() -> Iterator[None]:
    """What asks a process to end (``docker stop``, a CI timeout, a closed terminal) unwinds it as Ctrl-C does, so that
    no half bundle is left, and the exit code is a shell's for that signal. One that is ignored stays so (``nohup``)."""
    asked = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    for number in asked:
        signal.signal(number, _exit_by_signal)
    try:
        yield
    finally:
        for number in asked:
            signal.signal(number, signal.SIG_DFL)


def main() -> None:
    """Run the command line; a `UserError` is one message on stderr and exit code 2."""
    with signals_that_clean_up():
        run(app, "python -m exporter")
