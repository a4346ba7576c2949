"""The only file that knows the order of the steps from a YAML file to a verified bundle."""

from __future__ import annotations

import datetime
from importlib.metadata import version
from pathlib import Path

from exporter import verification
from exporter.backends import build_module, require_packages, traits
from exporter.bundle import Bundle, read_bundle, write_bundle
from exporter.checkpoint import Checkpoint
from exporter.config import ExportConfig
from exporter.machine import release_freed_memory, return_large_memory
from exporter.progress import Progress
from exporter.source import Source, open_source, program_decoder
from exporter.spec import Comparison, Manifest
from exporter.tokenizer import write_tokenizer
from exporter.tricks.rare_collections import rare_collections
from exporter.verification import Calls, NoReference, Run, eager_runs, english_calls, run, run_decoder
from exporter.verification.promise import check_quality, quality_floats

RECORDED_VERSIONS = ("ring-exporter", "torch", "transformers", "tokenizers", "gguf")


def export(config: ExportConfig, out: Path, progress: Progress) -> Bundle:
    """Write the bundle of `config` to `out`: every target built, checked, run and compared, one after the other.

    Raises:
        UserError: any of its kinds; nothing is left at `out` that was not there before.
    """
    return_large_memory()
    with rare_collections(), write_bundle(out) as writer:
        with progress.step("open checkpoint") as detail:
            source = open_source(config)
            for target in config.targets:  # what a format cannot carry is said before any work
                require_packages(target)
                source.states(target)
                source.recipe(target)
            detail(source.checkpoint.name)
        with progress.step("tokenizer"):
            tokenizer_dir = writer.path / "tokenizer"
            tokenizer_dir.mkdir()
            tokenizer = write_tokenizer(source.checkpoint, tokenizer_dir)
        release_freed_memory()
        distributions = (
            *RECORDED_VERSIONS,
            *(name for target in config.targets for name in traits(target).distributions),
        )
        manifest = Manifest(
            name=config.name,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            model=source.checkpoint.spec,
            cache=config.cache,
            max_context_length=source.limits.max_context_length,
            max_prefill_chunk=source.limits.max_prefill_chunk,
            dtype=config.dtype,
            source=source.checkpoint.source,
            tokenizer=tokenizer,
            programs=(),
            graph_checks=(),
            verification=(),
            versions={name: version(name) for name in distributions},
            files={},
        )
        for target in config.targets:
            manifest = add_program(manifest, target, writer.path, source, progress)
        return writer.finish(manifest)


def add_program(manifest: Manifest, target: str, directory: Path, source: Source, progress: Progress) -> Manifest:
    """Build the program of `target` in the staged bundle, run it beside the eager model, and add what was seen.

    Raises:
        GraphContractError: a graph check failed.
        VerificationError: the program is not the model.
    """
    decoder = program_decoder(source, target, directory, manifest.tokenizer, progress)
    back_end = build_module(target)
    options, recipe = source.config.options(target), source.recipe(target)
    built = back_end.build(decoder, source.limits, options, recipe, directory=directory, step=progress.step)
    alone = manifest.model_copy(update={"programs": (built.program,)})
    for name, text in back_end.beside(alone).items():
        (directory / name).write_text(text, encoding="utf-8")
    bundle = Bundle(directory, alone)
    calls = english_calls(bundle)
    release_freed_memory()
    own = run_decoder(alone, decoder, calls, progress)
    decoder.let_go()  # what comes now has weights of its own
    release_freed_memory()
    eager, original = eager_runs(alone, own, source.checkpoint, calls, progress)
    release_freed_memory()
    if not manifest.programs:  # once: the float model is the same for every format
        manifest = verify_model(manifest, source.checkpoint, original, calls, progress)
        release_freed_memory()
    with quality_floats(bundle, source, progress) as floats:  # before the program is loaded
        session = verification.open_session(bundle)
        with progress.step("verify against eager") as detail:
            comparisons = verify_staged(bundle, run(session, calls), eager, original, calls)
            detail(calls.described())
        program = built.program if floats is None else check_quality(bundle, session, source, floats, progress)
    return manifest.model_copy(
        update={
            "programs": (*manifest.programs, program),
            "graph_checks": (*manifest.graph_checks, *(c.model_copy(update={"format": target}) for c in built.checks)),
            "verification": (*manifest.verification, *comparisons),
        }
    )


def verify_model(
    manifest: Manifest, checkpoint: Checkpoint, original: Run, calls: Calls, progress: Progress
) -> Manifest:
    """Hold the float model that all programs come from to Transformers, and record what was seen, or why nothing was.

    Raises:
        VerificationError: what was read from the checkpoint is another model.
    """
    with progress.step("verify against Transformers") as detail:
        try:
            comparison, few = verification.compare_model_with_transformers(checkpoint, original, calls)
        except NoReference as reason:
            detail(f"not compared: {reason}")
            return manifest.model_copy(update={"not_compared": str(reason)})
        verification.judge([comparison], manifest)
        detail(few.described())
    return manifest.model_copy(update={"verification": (*manifest.verification, comparison)})


def verify_staged(bundle: Bundle, program: Run, eager: Run, original: Run, calls: Calls) -> list[Comparison]:
    """The short form of verification: hold the staged program to what the eager models said, and record that.

    Raises:
        VerificationError: the program is not the model.
    """
    comparisons = verification.compare_with_eager(program, eager, original)
    verification.judge(comparisons, bundle.manifest)
    verification.write_reference(bundle.path / verification.REFERENCE_FILE, original, calls)
    return comparisons


def verify_bundle(path: Path, config: ExportConfig | None, progress: Progress) -> list[Comparison]:
    """The full form, for every program of the bundle: what was recorded at export and, with the checkpoint at hand,
    eager and Transformers.

    Raises:
        BundleError: the bundle is damaged, or is not from this checkpoint.
        VerificationError: a comparison is out of bounds.
    """
    with progress.step("open bundle"):
        bundle = read_bundle(path)
    source = None
    if config is not None:
        source = open_source(config)
        verification.check_same_source(bundle.manifest, source.checkpoint.source, source.config)
    return [
        comparison
        for program in bundle.manifest.programs
        for comparison in verify_program(Bundle(path, bundle.manifest.of(program.format)), source, progress)
    ]


def verify_program(bundle: Bundle, source: Source | None, progress: Progress) -> list[Comparison]:
    """`verify_bundle` of a bundle's one program."""
    manifest = bundle.manifest
    with progress.step(f"{manifest.program.format}: against what was recorded"):
        session = verification.open_session(bundle)
        comparisons = [verification.compare_with_recorded(session, bundle.path / verification.REFERENCE_FILE)]
    if source is not None:
        effort = traits(manifest.program.format).effort.within(manifest.max_context_length)
        calls = english_calls(bundle, effort.tokens)
        decoder = program_decoder(source, manifest.program.format, bundle.path, manifest.tokenizer, progress)
        own = run_decoder(manifest, decoder, calls, progress)
        del decoder
        eager, original = eager_runs(manifest, own, source.checkpoint, calls, progress)
        with progress.step("against eager") as detail:
            comparisons += verification.compare_with_eager(run(session, calls), eager, original)
            detail(calls.described())
        del own, eager, original
        with progress.step("against Transformers") as detail:
            try:
                reference = verification.TransformersReference(source.checkpoint)
            except NoReference as reason:
                detail(f"not compared: {reason}")
            else:
                comparisons += verification.compare_with_transformers(session, reference, calls.ids, effort, detail)
    verification.judge(comparisons, manifest)
    return comparisons
