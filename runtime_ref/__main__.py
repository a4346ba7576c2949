"""``python -m runtime_ref``: run exported bundles from the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from exporter.bundle import Bundle, read_bundle
from exporter.console import results, run
from exporter.errors import ConfigError
from exporter.lengths import parse_lengths
from exporter.outputs import check_output, write_json
from exporter.units import in_unit
from runtime_ref.memory import context_costs, planned_usage

if TYPE_CHECKING:
    from runtime_ref.session import Session

app = typer.Typer(
    help="Run exported bundles on this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

FormatOption = Annotated[
    str | None,
    typer.Option("--format", help="Which program: executorch, coreml or coreai; the first if not given."),
]
BundleOption = Annotated[Path, typer.Option("--bundle", help="The directory that `exporter export` wrote.")]


@app.command()
def generate(
    *,
    bundle: BundleOption,
    format: FormatOption = None,
    prompt: Annotated[str, typer.Option(help="The text to continue; BOS is added where the model wants one.")],
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user's turn by the chat template.")
    ] = False,
    parse_special: Annotated[
        bool, typer.Option("--parse-special", help="With --chat: control tokens that the prompt spells are such.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Stop after this many tokens.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the best token every time.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Draw among the best tokens of this total probability.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw among this many best tokens.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed draws the same tokens.")] = 0,
    chunk: Annotated[
        int | None, typer.Option(help="Prompt tokens a program call; the bundle's largest chunk if not given.")
    ] = None,
) -> None:
    """Continue a prompt. Text goes to standard output as it comes; speed and cache go to standard error."""
    from runtime_ref.generate import Generation
    from runtime_ref.programs import choose
    from runtime_ref.sampling import Sampler
    from runtime_ref.tokenizer import Tokenizer

    sampler = Sampler(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    if not prompt:
        raise ConfigError("--prompt", got="an empty prompt", expected="some text", repair="Give a prompt.")
    if parse_special and not chat:
        raise ConfigError(
            "--parse-special",
            got="no --chat",
            expected="it beside --chat",
            repair="Leave it out: a plain prompt may spell control tokens.",
        )
    opened = choose(read_bundle(bundle), format)
    tokenizer = Tokenizer(opened)
    if chat:
        ids = tokenizer.encode_chat([{"role": "user", "content": prompt}], parse_special=parse_special)
    else:
        ids = tokenizer.encode(prompt)
    session = _session(opened)
    typer.echo(session.state.report(), err=True)
    generation = Generation(session, tokenizer, ids, sampler=sampler, max_new_tokens=max_new_tokens, chunk=chunk)
    for text in generation:
        typer.echo(text, nl=False)
        sys.stdout.flush()
    typer.echo()
    typer.echo(generation.report(), err=True)
    typer.echo(session.state.report(), err=True)


@app.command()
def score(
    *,
    bundle: BundleOption,
    format: FormatOption = None,
    ids: Annotated[Path, typer.Option(help="A JSON file with one list of token ids, BOS included.")],
    prefill: Annotated[int, typer.Option(help="How many of the ids go through prefill; the others go one by one.")],
    chunk: Annotated[int, typer.Option(help="Tokens a prefill call.")],
    out: Annotated[Path, typer.Option(help="The .npz file to write.")],
    logits: Annotated[
        bool, typer.Option("--logits", help="Keep whole logits too: 4 bytes x vocabulary a row.")
    ] = False,
) -> None:
    """Score a given sequence: log-probability of each true next token, best tokens and their logits.

    The file has one row for every position whose logits a program produced: the last of each prefill chunk, then
    every position. Arrays: position, logprob (NaN after the last), argmax, top_ids, top_logits (16 a row), logits.
    """
    from runtime_ref.programs import choose
    from runtime_ref.score import score as run_score
    from runtime_ref.score import write_scores

    tokens = _read_ids(ids)
    check_output("--out", out)
    session = _session(choose(read_bundle(bundle), format))
    typer.echo(session.state.report(), err=True)
    arrays = run_score(session, tokens, prefill=prefill, chunk=chunk, keep_logits=logits)
    write_scores(out, arrays)
    typer.echo(f"{len(arrays['position'])} positions of {len(tokens)} tokens -> {out}")


@app.command()
def memory(
    *,
    bundle: BundleOption,
    format: FormatOption = None,
    contexts: Annotated[
        str | None, typer.Option(help="Context lengths to compare, e.g. 512,2048; the usual ones if not given.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens in the conversation; the bundle's whole context if not given.")
    ] = None,
) -> None:
    """Show what the cache costs: by kind of layer, and against caches that keep every token in every layer."""
    from runtime_ref.programs import choose

    manifest = choose(read_bundle(bundle, verify_files=False), format).manifest
    reached = manifest.max_context_length if tokens is None else tokens
    kinds = Table("layers", "number", "rows", "allocated", "used", title=f"Cache after {reached} tokens")
    for kind in planned_usage(manifest, reached):
        sizes = [in_unit(count, "MiB") for count in (kind.allocated_bytes, kind.used_bytes)]
        kinds.add_row(kind.kind, str(kind.layers), str(kind.rows), *sizes)
    costs = Table("context", "allocated", "full caches", "saved", title="Against full caches")
    for cost in context_costs(manifest, None if contexts is None else parse_lengths("--contexts", contexts)):
        saved = 1 - cost.allocated_bytes / cost.full_bytes
        sizes = [in_unit(count, "MiB") for count in (cost.allocated_bytes, cost.full_bytes)]
        costs.add_row(str(cost.tokens), *sizes, f"{saved:.0%}")
    console = results()
    console.print(kinds)
    console.print(costs)


@app.command()
def bench(
    *,
    bundle: BundleOption,
    format: FormatOption = None,
    threads: Annotated[int, typer.Option(help="Threads that the runtime computes with.")] = 2,
    prefills: Annotated[
        str | None, typer.Option(help="Prompt lengths, e.g. 128,512; the usual ones that fit if not given.")
    ] = None,
    contexts: Annotated[
        str | None, typer.Option(help="Tokens in the cache before decoding; the usual ones that fit if not given.")
    ] = None,
    nll: Annotated[bool, typer.Option("--nll/--no-nll", help="Score a thousand tokens of English as well.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every figure to this file too.")] = None,
) -> None:
    """Measure load, prefill, decode, memory and likelihood, and how near decoding comes to the memory's bandwidth."""
    from runtime_ref.bench import bench as measure
    from runtime_ref.bench import english_tokens
    from runtime_ref.bench_report import as_json, tables
    from runtime_ref.programs import choose

    opened = choose(read_bundle(bundle), format)
    lengths = [None if text is None else parse_lengths(name, text) for name, text in (
        ("--prefills", prefills), ("--contexts", contexts)
    )]  # fmt: skip
    if json_file is not None:
        check_output("--json", json_file)
    found = measure(
        opened, english_tokens(opened), threads=threads, prefills=lengths[0], contexts=lengths[1], scoring=nll
    )
    console = results()
    for table in tables(found):
        console.print(table)
    if json_file is not None:
        write_json("--json", json_file, as_json(found))


@app.command()
def quality(
    *,
    bundle: BundleOption,
    format: FormatOption = None,
    reference: Annotated[
        Path | None,
        typer.Option(
            help="What to compare with: a Hugging Face directory, a GGUF file, or a bundle without quantisation. "
            "Without one, what was recorded at export is shown."
        ),
    ] = None,
    domains: Annotated[
        str | None, typer.Option(help="Kinds of text, e.g. 'French; C source'; all if not given.")
    ] = None,
    positions: Annotated[int, typer.Option(min=2, help="Tokens to score in each.")] = 1000,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every figure to this file too.")] = None,
) -> None:
    """Compare predictions with the float model's on fourteen kinds of text in nine languages."""
    from rich.progress import Progress

    from exporter.console import messages
    from exporter.quality.table import quality_table, recorded_table
    from runtime_ref.programs import choose, prepare_runtime
    from runtime_ref.quality import chosen_domains, open_reference
    from runtime_ref.quality import quality as measure

    opened = choose(read_bundle(bundle), format)
    program, wanted = opened.manifest.program, chosen_domains(domains)
    if reference is None:
        if program.quality is None:
            raise ConfigError(
                "--reference",
                got=f"none, and the bundle {opened.manifest.name} has no quality recorded",
                expected="a Hugging Face directory, a GGUF file or a bundle without quantisation",
                repair="Name the checkpoint that the bundle came from.",
            )
        results().print(recorded_table(program.format, program.quality))
        return
    if json_file is not None:
        check_output("--json", json_file)
    prepare_runtime(program.format)
    model = open_reference(reference)
    with Progress(console=messages(), transient=True) as progress:
        task = progress.add_task("load")
        found = list(
            measure(
                opened, model, wanted, positions,
                lambda name, done, total: progress.update(task, description=name, completed=done, total=total),
            )
        )  # fmt: skip
    results().print(quality_table(f"{opened.manifest.name}, {program.format}, {program.weights}", found))
    if json_file is not None:
        content = {"bundle": opened.manifest.name, "weights": program.weights}
        write_json("--json", json_file, content | {"domains": [one.model_dump() for one in found]})


def _session(bundle: Bundle) -> Session:
    """An empty one with the one program of `bundle`, in a process that does nothing else."""
    from runtime_ref.programs import load_program, prepare_runtime
    from runtime_ref.session import Session

    prepare_runtime(bundle.manifest.program.format)
    return Session(bundle.manifest, load_program(bundle))


def _read_ids(path: Path) -> list[int]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--ids {path}", got=f"{error}", expected="a JSON list of token ids", repair="Name a JSON file."
        ) from error
    if not isinstance(content, list) or not all(type(token) is int for token in content):
        raise ConfigError(f"--ids {path}", got="other JSON", expected="one list of integers", repair="Write [1, 2, 3].")
    return content


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; a `UserError` becomes one message on standard error and exit code 2."""
    run(app, "python -m runtime_ref", argv)


if __name__ == "__main__":
    main()
