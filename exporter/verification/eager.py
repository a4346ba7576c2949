"""The eager models beside a program: the one it was made of, and the float one that came from the checkpoint."""

from __future__ import annotations

from exporter.backends import traits
from exporter.cache.plain import PlainKernels
from exporter.checkpoint import Checkpoint
from exporter.model.decoder import Decoder, parameter_shapes
from exporter.progress import Progress
from exporter.quantization.rounding import round_weights
from exporter.spec import Manifest
from exporter.verification.runs import Calls, Run, run_by_layers


def run_decoder(manifest: Manifest, decoder: Decoder, calls: Calls, progress: Progress) -> Run:
    """What the decoder that the program was made of makes of `calls`, on plain kernels: over the program's caches where
    the decoder is rounded as the program is, in floats where the back end rounds while it converts."""
    with progress.step("run eager"):
        caches = manifest if traits(manifest.program.format).decoder_is_rounded else manifest.with_float_caches()
        return run_by_layers(caches, decoder.with_kernels(PlainKernels()), calls)


def eager_runs(
    manifest: Manifest, own: Run, checkpoint: Checkpoint, calls: Calls, progress: Progress
) -> tuple[Run, Run]:
    """What the eager model with the weights and caches of the program makes of `calls`, and what the float one does
    that it came from: the one is `run_decoder`'s, the other read again where weights or caches are rounded."""
    on_floats, program = manifest.with_float_caches(), manifest.program
    shapes = parameter_shapes(checkpoint.spec)
    if traits(program.format).decoder_is_rounded:
        if not manifest.is_quantized:
            return own, own
        with progress.step("read and run float eager"):
            original = Decoder.unread(checkpoint.spec, on_floats.states, PlainKernels())
            return own, run_by_layers(on_floats, original, calls, checkpoint.reader(shapes), own.hidden)
    if not program.recipe.rounded:
        return own, own
    with progress.step("read and round weights"):
        weights = checkpoint.load_state_dict(shapes)
        rounded = Decoder.from_state_dict(checkpoint.spec, on_floats.states, PlainKernels(), weights)
        round_weights(rounded, program.recipe)
    with progress.step("run rounded eager"):
        return run_by_layers(on_floats, rounded, calls), own
