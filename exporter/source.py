"""An opened checkpoint with its config, and the decoders that are made of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from exporter.backends import build_module, traits
from exporter.cache.interface import CacheKernels
from exporter.checkpoint import Checkpoint, open_checkpoint
from exporter.config import ExportConfig, resolve
from exporter.machine import release_freed_memory
from exporter.model.decoder import Decoder, parameter_shapes
from exporter.programs import Limits
from exporter.progress import Progress
from exporter.quantization import quantize
from exporter.quantization.passages import Calibration, calibration
from exporter.spec import Recipe, StateSpec, TokenizerSpec, state_specs
from exporter.text.encoder import Encoder


@dataclass(frozen=True)
class Source:
    """An opened checkpoint with the config settled against it."""

    config: ExportConfig
    checkpoint: Checkpoint
    limits: Limits
    _recipes: dict[str, Recipe] = field(default_factory=dict, init=False, repr=False)
    _calibration: list[Calibration] = field(default_factory=list, init=False, repr=False)

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

    @property
    def calibration_sha256(self) -> str | None:
        """Of the user's own text; None where those that come with the exporter calibrate."""
        own = self.config.calibration
        return None if own is None else hashlib.sha256(own.read_bytes()).hexdigest()

    def calibration(self, bundle: Path, tokenizer: TokenizerSpec) -> Calibration:
        """The texts that calibrate, as the tokenizer in `bundle` has them; worked out once.

        Raises:
            ConfigError: the config's own cannot be read, or is too short.
        """
        if not self._calibration:
            encoder = Encoder(bundle / "tokenizer", tokenizer)
            own = calibration(encoder, self.limits.max_context_length, self.config.calibration)
            self._calibration.append(own)
        return self._calibration[0]


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
    the tokens that the tokenizer in `bundle` makes of the calibration texts."""
    recipe = source.recipe(target)
    if recipe.is_float32 or not traits(target).decoder_is_rounded:
        return target_decoder(source, target, progress)
    with progress.step("read and quantise") as detail:
        passages = []
        if recipe.is_calibrated:
            passages = source.calibration(bundle, tokenizer).passages
            release_freed_memory()  # a tokenizer's
            tokens = sum(ids.shape[1] for ids in passages)
            detail(f"calibrated on {tokens} tokens of {len(passages)} passages")
        kernels = build_module(target).kernels(source.config.options(target))
        decoder = Decoder.unread(source.checkpoint.spec, source.states(target), kernels)
        quantize(decoder, recipe, passages, source.checkpoint.reader(parameter_shapes(decoder.spec)))
        release_freed_memory()
        return decoder
