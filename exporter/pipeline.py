"""The only file that knows the order of the steps from a YAML file to a verified bundle."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from torch.export import ExportedProgram

from exporter import verify
from exporter.backends.executorch import ExecutorchKernels, lower
from exporter.bundle import Bundle, BundleWriter, read_bundle, write_bundle
from exporter.cache.plain import PlainKernels
from exporter.checkpoint import Checkpoint, open_checkpoint
from exporter.config import ExportConfig, resolve
from exporter.graph import (
    ProgramContract,
    check_exported,
    check_lowered,
    read_pte,
    refuse_failed,
    runtime_registry,
)
from exporter.graph.contract import delegated_floor
from exporter.model.decoder import Decoder, parameter_shapes
from exporter.programs import METHODS, Limits, Method, method_spec, trace
from exporter.progress import Progress
from exporter.quantization import quantize
from exporter.spec import CheckResult, Comparison, Manifest, ProgramSpec, StateSpec, state_specs
from exporter.tokenizer import write_tokenizer

PROGRAM_FILE = "model.pte"
RECORDED_VERSIONS = ("ring-exporter", "torch", "executorch", "torchao", "transformers", "tokenizers", "gguf")


@dataclass(frozen=True)
class Source:
    """An opened checkpoint with the config settled against it."""

    config: ExportConfig
    checkpoint: Checkpoint
    states: tuple[StateSpec, ...]
    limits: Limits


def open_source(config: ExportConfig) -> Source:
    """Open the checkpoint and settle every length; no tensor is read."""
    checkpoint = open_checkpoint(config.checkpoint)
    config = resolve(config, checkpoint.spec)
    assert config.max_context_length is not None
    limits = Limits(max_context_length=config.max_context_length, max_prefill_chunk=config.max_prefill_chunk)
    return Source(config, checkpoint, state_specs(checkpoint.spec, config.cache, limits.max_context_length), limits)


def read_decoder(source: Source, progress: Progress) -> Decoder:
    """The float model of `source`, on ExecuTorch's caches."""
    with progress.step("read checkpoint") as detail:
        state_dict = source.checkpoint.load_state_dict(
            parameter_shapes(source.checkpoint.spec), lambda done, total: detail(f"{done} of {total} tensors")
        )
        return Decoder.from_state_dict(source.checkpoint.spec, source.states, ExecutorchKernels(), state_dict)


def quantize_decoder(decoder: Decoder, source: Source, progress: Progress) -> None:
    """Quantise in place, if the config says so."""
    if source.config.quantization.is_quantized:
        with progress.step("quantise"):
            quantize(decoder, source.config.quantization)


def export(config: ExportConfig, out: Path, progress: Progress) -> Bundle:
    """Write the bundle of `config` to `out`.

    Raises:
        UserError: any of its kinds; nothing is left at `out` that was not there before.
    """
    with write_bundle(out) as writer:
        with progress.step("open checkpoint") as detail:
            source = open_source(config)
            detail(source.checkpoint.name)
        with progress.step("tokenizer"):
            tokenizer_dir = writer.path / "tokenizer"
            tokenizer_dir.mkdir()
            tokenizer = write_tokenizer(source.checkpoint, tokenizer_dir)
        decoder = read_decoder(source, progress)
        quantize_decoder(decoder, source, progress)
        with progress.step("trace prefill and main"):
            programs = {method: trace(decoder, method, source.limits) for method in METHODS}
        contracts = graph_contracts(decoder, source.limits)
        with progress.step("check graphs") as detail:
            checks = check_programs(programs, contracts)
            detail(f"{len(checks)} checks passed")
        with progress.step("lower to ExecuTorch") as detail:
            data = lower(programs)
            del programs
            (writer.path / PROGRAM_FILE).write_bytes(data)
            detail(f"{len(data) / 1e6:.0f} MB")
        with progress.step("check lowered program") as detail:
            runtime, operators = runtime_registry()
            lowered = check_lowered(data, contracts, operators)
            refuse_failed(lowered)
            checks += lowered
            file = read_pte(data)
            outside = sorted({name for plan in file.plans.values() for name in plan.operators_called()})
            del data, file
            detail(f"{len(lowered)} checks passed")
        manifest = Manifest(
            name=config.name,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            model=source.checkpoint.spec,
            states=source.states,
            cache=config.cache,
            max_context_length=source.limits.max_context_length,
            max_prefill_chunk=source.limits.max_prefill_chunk,
            dtype=config.dtype,
            quantization=config.quantization,
            source=source.checkpoint.source,
            tokenizer=tokenizer,
            programs=(
                ProgramSpec(
                    format="executorch",
                    file=PROGRAM_FILE,
                    methods={method: method_spec(decoder, method, source.limits) for method in METHODS},
                    runtime=runtime,
                    operators=tuple(outside),
                ),
            ),
            graph_checks=tuple(checks),
            verification=(),
            versions={name: version(name) for name in RECORDED_VERSIONS},
            files={},
        )
        comparisons = verify_staged(writer, manifest, decoder, source, progress)
        return writer.finish(manifest.model_copy(update={"verification": tuple(comparisons)}))


def graph_contracts(decoder: Decoder, limits: Limits) -> tuple[ProgramContract, ...]:
    """What every method promises; a lowering that delegates less than was measured breaks it."""
    return tuple(
        ProgramContract(
            method=method,
            interface=method_spec(decoder, method, limits),
            states=decoder.states,
            min_delegated_share=delegated_floor(method, decoder.states),
        )
        for method in METHODS
    )


def check_programs(
    programs: Mapping[Method, ExportedProgram], contracts: Sequence[ProgramContract]
) -> list[CheckResult]:
    """Hold every traced program to its contract.

    Raises:
        GraphContractError: a check failed.
    """
    results = [
        result
        for method, contract in zip(METHODS, contracts, strict=True)
        for result in check_exported(programs[method], contract)
    ]
    refuse_failed(results)
    return results


Sessions = tuple[verify.Session, verify.Session]


def eager_sessions(manifest: Manifest, decoder: Decoder, source: Source, progress: Progress) -> Sessions:
    """The eager model as exported, and before quantisation of weights and caches: read again, or the same one when
    nothing was quantised."""
    eager = verify.eager_session(manifest, decoder.with_kernels(PlainKernels()))
    if not manifest.is_quantized:
        return eager, eager
    on_floats = manifest.with_float_caches()
    original = read_decoder(replace(source, states=on_floats.states), progress)
    return eager, verify.eager_session(on_floats, original.with_kernels(PlainKernels()))


def verify_staged(
    writer: BundleWriter, manifest: Manifest, decoder: Decoder, source: Source, progress: Progress
) -> list[Comparison]:
    """The short form of verification: run the staged program beside the eager model, and record what that said.

    Raises:
        VerificationError: the program is not the model.
    """
    eager, original = eager_sessions(manifest, decoder, source, progress)
    with progress.step("verify against eager") as detail:
        bundle = Bundle(writer.path, manifest)
        session = verify.open_session(bundle)
        pieces = verify.schedule(manifest)
        ids = verify.bundle_ids(bundle, sum(pieces))
        comparisons = verify.compare_with_eager(session, eager, original, ids, pieces)
        verify.judge(comparisons, manifest, verify.baseline_divergence(comparisons))
        verify.write_reference(writer.path / verify.REFERENCE_FILE, original, ids, pieces)
        detail(f"{len(pieces)} calls over {sum(pieces)} tokens")
    return comparisons


def verify_bundle(path: Path, config: ExportConfig | None, progress: Progress) -> list[Comparison]:
    """The full form: what was recorded at export and, with the checkpoint at hand, eager and Transformers.

    Raises:
        BundleError: the bundle is damaged, or is not from this checkpoint.
        VerificationError: a comparison is out of bounds.
    """
    with progress.step("open bundle"):
        bundle = read_bundle(path)
        session = verify.open_session(bundle)
    manifest = bundle.manifest
    with progress.step("against what was recorded"):
        comparisons = [verify.compare_with_recorded(session, path / verify.REFERENCE_FILE)]
    baseline = verify.baseline_divergence(manifest.verification)
    if config is not None:
        source = open_source(config)
        verify.check_same_source(manifest, source.checkpoint.source, source.config.quantization, source.config.cache)
        ids = verify.bundle_ids(bundle, min(verify.TOKENS, manifest.max_context_length - verify.GREEDY))
        decoder = read_decoder(source, progress)
        quantize_decoder(decoder, source, progress)
        eager, original = eager_sessions(manifest, decoder, source, progress)
        with progress.step("against eager") as detail:
            pieces = verify.long_schedule(manifest, len(ids))
            against_eager = verify.compare_with_eager(session, eager, original, ids, pieces)
            baseline = verify.baseline_divergence(against_eager)
            comparisons += against_eager
            detail(f"{len(pieces)} calls over {sum(pieces)} tokens")
        del decoder, eager, original
        with progress.step("against Transformers") as detail:
            reference = verify.TransformersReference(source.checkpoint)
            comparisons += verify.compare_with_transformers(session, reference, ids, verify.GREEDY, detail)
    verify.judge(comparisons, manifest, baseline)
    return comparisons
