"""Whether a program keeps the promise of its preset, on the model it was made of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from exporter.bundle import Bundle
from exporter.cache.plain import PlainKernels
from exporter.errors import VerificationError
from exporter.machine import release_freed_memory
from exporter.model.decoder import Decoder, parameter_shapes
from exporter.progress import Progress
from exporter.quantization import quantize
from exporter.source import Source
from exporter.spec import QUALITY_PROMISES, ProgramSpec, Quality
from exporter.text.encoder import Encoder
from exporter.verification.quality import (
    OWN_TEXT,
    FloatLogits,
    float_logits,
    score_decoder,
    score_session,
    short_texts,
)
from runtime_ref.session import Session


@contextmanager
def quality_floats(bundle: Bundle, source: Source, progress: Progress) -> Iterator[FloatLogits | None]:
    """What the float model says of the short form of the quality suite, in a file while this is entered; None where no
    preset promises anything."""
    manifest = bundle.manifest
    if source.config.options(manifest.program.format).preset is None:
        yield None
        return
    held_out = source.calibration(bundle.path, manifest.tokenizer).held_out
    encoder = Encoder(bundle.path / "tokenizer", manifest.tokenizer)
    texts = short_texts(encoder, manifest.max_context_length, held_out)
    with ExitStack() as stack:
        with progress.step("run float eager on texts") as detail:
            floats = stack.enter_context(float_logits(source.checkpoint, manifest, texts, bundle.path.parent))
            release_freed_memory()
            detail(f"{sum(one.positions for own in texts.values() for one in own)} tokens of {len(texts)} texts")
        yield floats


def check_quality(
    bundle: Bundle, session: Session, source: Source, floats: FloatLogits, progress: Progress
) -> ProgramSpec:
    """The staged program with what was seen of it on the short form of the quality suite.

    Raises:
        VerificationError: it breaks the promise of its preset and the config does not accept that.
    """
    manifest = bundle.manifest
    preset = source.config.options(manifest.program.format).preset
    assert preset is not None
    with progress.step("quality of the program") as detail:
        scores = score_session(session, floats)
        own = scores.pop(OWN_TEXT, None)
        quality = Quality(
            preset=preset, promise=QUALITY_PROMISES[preset], domains=tuple(scores.values()),
            calibration_sha256=source.calibration_sha256, own_text=own,
        )  # fmt: skip
        if (worst := quality.worst) is not None:
            detail(f"worst text: {worst.domain}, KL {worst.kl:.4f}")
        if quality.broken and source.config.quality != "accept":
            detail("the promise is broken: looking for a preset that keeps its own")
            raise _refused(quality, _preset_that_holds(bundle, preset, source, floats))
    accepted = quality.model_copy(update={"accepted": bool(quality.broken)})
    return manifest.program.model_copy(update={"quality": accepted})


def _refused(quality: Quality, holds: str | None) -> VerificationError:
    promise = quality.promise
    instead = f"Take {holds}, which keeps its promise here" if holds else "No preset keeps its promise here: take none"
    return VerificationError(
        f"quality of {quality.preset}",
        got="; ".join(quality.broken),
        expected=f"a mean KL divergence up to {promise.kl:g} and an NLL gap up to {promise.nll:g} nats in every domain",
        repair=f"{instead}, or ship it all the same with `quality: accept` in the YAML.",
    )


def _preset_that_holds(bundle: Bundle, broken: str, source: Source, floats: FloatLogits) -> str | None:
    """The nearest preset of those that promise more than `broken` which keeps its promise as an eager model."""
    manifest = bundle.manifest
    format = manifest.program.format
    checkpoint, promises = source.checkpoint, QUALITY_PROMISES
    finer = [name for name in promises if promises[name].kl < promises[broken].kl]
    for name in sorted(finer, key=lambda name: -promises[name].kl):
        options = source.config.options(format).with_preset(name)
        shapes = parameter_shapes(checkpoint.spec)
        decoder = Decoder.unread(checkpoint.spec, source.states(format), PlainKernels())
        passages = source.calibration(bundle.path, manifest.tokenizer).passages
        recipe = options.recipe(shapes, checkpoint.spec.tie_word_embeddings)
        quantize(decoder, recipe, passages, checkpoint.reader(shapes))
        scores = score_decoder(decoder, floats)
        scores.pop(OWN_TEXT, None)
        if not any(promises[name].broken(list(scores.values()))):
            return name
    return None
