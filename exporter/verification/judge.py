"""Which comparisons a program must pass, and whether a bundle is of the checkpoint it is compared with."""

from __future__ import annotations

from collections.abc import Sequence

from exporter.config import ExportConfig
from exporter.errors import BundleError, VerificationError
from exporter.spec import EAGER, FLOAT, Comparison, Manifest, SourceSpec
from exporter.verification.compare import BASELINE, RECORDED, TRANSFORMERS

FLOAT_MAX, FLOAT_MEAN = 1e-2, 1e-3
SLACK, HALF = 0.02, 1e-3
"""Mean KL divergence, in nats, that is never too much: of a program that rounds from the float model, and of float16
arithmetic from float32 (measured: 1.2e-5 on Gemma 3 270M)."""


def check_same_source(manifest: Manifest, source: SourceSpec, config: ExportConfig) -> None:
    """Refuse to compare a bundle with weights it does not come from.

    Raises:
        BundleError: other files, or other quantisation of weights or caches, than the manifest records.
    """
    asked: list[tuple[str, object, object]] = [
        ("checkpoint files", source.files, manifest.source.files),
        ("quantization", config.quantization, manifest.quantization),
        ("cache.dtype", config.cache.caches, manifest.cache.caches),
    ]
    for program in manifest.programs:
        if program.format != "executorch":
            options = config.coreml if program.format == "coreml" else config.coreai
            asked.append((f"{program.format}.weights", options.weights, program.weights))
            asked.append((f"{program.format}.keep_int8", options.keep_int8, program.keep_int8))
    for what, got, want in asked:
        if got != want:
            raise BundleError(
                f"bundle {manifest.name}",
                got=f"{what} {got} in the config",
                expected=f"{want}, as the manifest records",
                repair="Give the config this bundle was exported with.",
            )


def judge(comparisons: Sequence[Comparison], manifest: Manifest, baseline: float) -> None:
    """Refuse a program that is not the model it claims to be.

    Float programs: logits within `FLOAT_MAX`, and `FLOAT_MEAN` on average. A quantised program rounds at run time,
    activations or the rows of its caches, and where two implementations round a borderline value apart, all that
    follows differs by as much as rounding itself does. So it is held to the distribution: its mean KL divergence from
    the float model is at most twice `baseline`, that of its own eager model, plus `SLACK`. In the other formats
    activations are floats, and the program is held to its eager model as well: at most twice `baseline` (the grids of
    the converters are not quite ours) plus `HALF` apart.

    Raises:
        VerificationError: which comparison failed, and by how much.
    """
    for c in comparisons:
        if not manifest.is_quantized:
            bad = not (c.max_abs_difference <= FLOAT_MAX and c.mean_abs_difference <= FLOAT_MEAN)
            expected = f"max |difference| <= {FLOAT_MAX} and mean <= {FLOAT_MEAN}"
        else:
            from_float = c.reference in {FLOAT, RECORDED} or c.reference.startswith(TRANSFORMERS)
            if not from_float and (c.reference != EAGER or c.format == "executorch"):
                continue
            limit = 2 * baseline + (SLACK if from_float else HALF)
            bad = not c.mean_kl_divergence <= limit
            expected = f"mean KL divergence <= {limit:.3g}"
        if bad:
            raise VerificationError(
                f"verification against {c.reference}",
                got=f"max |difference| {c.max_abs_difference:.3g}, mean {c.mean_abs_difference:.3g}, "
                f"mean KL divergence {c.mean_kl_divergence:.3g} over {c.positions} positions",
                expected=expected,
                repair="The program does not compute the model it came from; do not ship it.",
            )


def baseline_divergence(comparisons: Sequence[Comparison]) -> float:
    """The KL divergence that quantisation alone costs, measured in eager; 0 for a float program."""
    return next((c.mean_kl_divergence for c in comparisons if c.reference == BASELINE), 0.0)
