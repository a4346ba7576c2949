"""The only file that knows the order of the steps from a YAML file to a verified bundle."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from exporter import verification
from exporter.backends import build_module, require_packages, traits
from exporter.bundle import Bundle, read_bundle, write_bundle
from exporter.cache.interface import CacheKernels
from exporter.checkpoint import Checkpoint, open_checkpoint
from exporter.config import ExportConfig, resolve
from exporter.machine import release_freed_memory, return_large_memory
from exporter.model.decoder import Decoder, parameter_shapes
from exporter.programs import Limits
from exporter.progress import Progress
from exporter.quantization import quantize
from exporter.quantization.calibration import calibration_ids
from exporter.spec import Comparison, Manifest, Recipe, StateSpec, TokenizerSpec, state_specs
from exporter.tokenizer import write_tokenizer
from exporter.tricks.rare_collections import rare_collections
from exporter.verification import Calls, NoReference, Run, eager_runs, english_calls, run, run_decoder

RECORDED_VERSIONS = ("ring-exporter", "torch", "transformers", "tokenizers", "gguf")


@dataclass(frozen=True)
class Source:
    """An opened checkpoint with the config settled against it."""

    config: ExportConfig
    checkpoint: Checkpoint
    limits: Limits
    _recipes: dict[str, Recipe] = field(default_factory=dict, init=False, repr=False)

    def states(self, target: str) -> tuple[StateSpec, ...]:
        """The state as the programs of `target` take it.

        Raises:
            ConfigError: the model's states do not fit that format.
        """
        context, own = self.limits.max_context_length, traits(target)
        return state_specs(self.checkpoint.spec, self.config.cache, context, own.layout, own.state_dtype)

    def recipe(self, target: str) -> Recipe:
        """In which form the program of `target` keeps every parameter; worked out once.

        Raises:
            ConfigError: the config asks for what the format or the model has not.
        """
        if target not in self._recipes:
            spec, options = self.checkpoint.spec, self.config.options(target)
            self._recipes[target] = options.recipe(parameter_shapes(spec), spec.tie_word_embeddings)
        return self._recipes[target]


def open_source(config: ExportConfig) -> Source:
    """Open the checkpoint and settle every length; no tensor is read."""
    checkpoint = open_checkpoint(config.checkpoint)
    config = resolve(config, checkpoint.spec)
    assert config.max_context_length is not None
    limits = Limits(max_context_length=config.max_context_length, max_prefill_chunk=config.max_prefill_chunk)
    return Source(config, checkpoint, limits)


def read_decoder(source: Source, states: Sequence[StateSpec], kernels: CacheKernels, progress: Progress) -> Decoder:
    """The float32 model of `source` over `states`."""
    with progress.step("read checkpoint") as detail:
        state_dict = source.checkpoint.load_state_dict(
            parameter_shapes(source.checkpoint.spec), lambda done, total: detail(f"{done} of {total} tensors")
        )
        return Decoder.from_state_dict(source.checkpoint.spec, states, kernels, state_dict)


def target_decoder(source: Source, target: str, progress: Progress) -> Decoder:
    """The float32 model over the states and kernels of `target`."""
    kernels = build_module(target).kernels(source.config.options(target))
    return read_decoder(source, source.states(target), kernels, progress)


def program_decoder(source: Source, target: str, bundle: Path, tokenizer: TokenizerSpec, progress: Progress) -> Decoder:
    """The model as the back end of `target` takes it: where that is a rounded decoder, quantised while it is read, by
    the text that the tokenizer in `bundle` makes of the calibration chapters."""
    recipe = source.recipe(target)
    if recipe.is_float32 or not traits(target).decoder_is_rounded:
        return target_decoder(source, target, progress)
    with progress.step("read and quantise") as detail:
        ids = None
        if recipe.is_calibrated:
            ids = calibration_ids(bundle / "tokenizer", tokenizer, source.limits.max_context_length)
            release_freed_memory()  # a tokenizer's
            detail(f"calibrated on {ids.shape[1]} tokens")
        kernels = build_module(target).kernels(source.config.options(target))
        decoder = Decoder.unread(source.checkpoint.spec, source.states(target), kernels)
        quantize(decoder, recipe, ids, source.checkpoint.reader(parameter_shapes(decoder.spec)))
        release_freed_memory()
        return decoder


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
    comparisons = verify_staged(bundle, eager, original, calls, progress)
    return manifest.model_copy(
        update={
            "programs": (*manifest.programs, built.program),
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


def verify_staged(bundle: Bundle, eager: Run, original: Run, calls: Calls, progress: Progress) -> list[Comparison]:
    """The short form of verification: hold the staged program to what the eager models said, and record that.

    Raises:
        VerificationError: the program is not the model.
    """
    manifest = bundle.manifest
    with progress.step("verify against eager") as detail:
        program = run(verification.open_session(bundle), calls)
        comparisons = verification.compare_with_eager(program, eager, original)
        verification.judge(comparisons, manifest)
        verification.write_reference(bundle.path / verification.REFERENCE_FILE, original, calls)
        detail(calls.described())
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
