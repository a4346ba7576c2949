"""Which comparisons a program must pass, and whether a bundle is of the checkpoint it is compared with.

docs/verification.md has the rules as a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from exporter.backends import traits
from exporter.config import ExportConfig
from exporter.errors import BundleError, VerificationError
from exporter.spec import EAGER, Comparison, Manifest, SourceSpec
from exporter.verification.compare import BASELINE, LAYERS

Rounding = Literal["nothing", "float16", "int8 rows", "activations"]
"""The coarsest that a program rounds while it runs. Its weights are rounded already, and equally in its eager model."""


class Bounds(NamedTuple):
    """How far a program may be from its own eager model: mean KL divergence of the logits in nats, the share of other
    first choices, and the errors of states as `states.StateErrors` has them, of one row and of a head's on average."""

    kl: float
    disagreement: float
    row: float
    mean: float


BOUNDS: dict[Rounding, Bounds] = {
    "nothing": Bounds(1e-6, 0.1, 1e-3, 1e-4),
    "float16": Bounds(0.01, 0.2, 0.15, 0.05),
    "int8 rows": Bounds(0.05, 0.4, 0.6, 0.15),
    "activations": Bounds(0.05, 0.4, 0.6, 0.15),
}
OWN_SHARE, OWN_FLOOR = 2.0, 1e-4
"""A program that rounds as its eager model does is as near to it, in mean KL divergence, as that many times what the
eager model's layers are from the float ones, and that much. Where two runs round borderline values apart, each is off
by about that divergence on its own, so they differ by twice as much; the rest is what attention in bfloat16 adds. The
largest share that was measured is 1.26, of SmolLM2 135M in int8."""
FLOAT_MAX, FLOAT_MEAN = 1e-2, 1e-3
"""Of the difference of logits between a program of floats and a float model, the largest and the mean."""
MODEL_MAX = 2e-5
"""Of the difference of logits between the float model and Transformers, as a share of the largest logit."""


class Held(NamedTuple):
    """Something that was seen, and the most it may be."""

    what: str
    got: float
    most: float


def judge(comparisons: Sequence[Comparison], manifest: Manifest) -> None:
    """Refuse a program that is not the model it claims to be. `comparisons` are all that was seen of one program.

    Raises:
        VerificationError: which comparison failed, and by how much.
    """
    seen = {one.reference: one.mean_kl_divergence for one in comparisons}
    own = seen.get(LAYERS, seen.get(BASELINE))
    for comparison in comparisons:
        broken = [one for one in held_to(comparison, manifest, own) if not one.got <= one.most]  # NaN is broken too
        if broken:
            where = f" (worst in {comparison.worst_state})" if comparison.worst_state else ""
            raise VerificationError(
                f"verification against {comparison.reference}",
                got=", ".join(f"{one.what} {one.got:.3g}" for one in broken)
                + f" over {comparison.positions} positions{where}",
                expected=", ".join(f"{one.what} <= {one.most:.3g}" for one in broken),
                repair="The program does not compute the model it came from; do not ship it.",
            )


def held_to(comparison: Comparison, manifest: Manifest, own: float | None) -> Iterator[Held]:
    """The bounds of one comparison: of the float model with Transformers, of a program with its own eager model, or of
    either with the float model, which a quantised one is only near. `own` is the mean KL divergence of the eager model
    from the float one, where it was seen: of its layers alone, for what a head of few bits loses the program loses
    alike."""
    if comparison.format is None:
        share = comparison.max_abs_difference / max(comparison.largest_logit, 1.0)
        yield Held("max |difference| / largest logit", share, MODEL_MAX)
        return
    if comparison.reference == EAGER:
        rounding = rounding_of(manifest)
        bounds = BOUNDS[rounding]
        most = bounds.kl
        if own is not None and rounding in ("activations", "int8 rows"):
            most = min(most, OWN_SHARE * own + OWN_FLOOR)
        yield Held("mean KL divergence", comparison.mean_kl_divergence, most)
        yield Held("share of other first choices", 1 - comparison.argmax_agreement, bounds.disagreement)
        for what, got, most in (
            ("error of a row of state", comparison.max_state_error, bounds.row),
            ("mean error of rows of state", comparison.mean_state_error, bounds.mean),
        ):
            if got is not None:
                yield Held(what, got, most)
    elif manifest.is_quantized:
        yield Held("mean KL divergence", comparison.mean_kl_divergence, manifest.program.max_kl_divergence)
    if not manifest.is_quantized:
        yield Held("max |difference|", comparison.max_abs_difference, FLOAT_MAX)
        yield Held("mean |difference|", comparison.mean_abs_difference, FLOAT_MEAN)


def rounding_of(manifest: Manifest) -> Rounding:
    """What the one program of `manifest` rounds while it runs. float16 weights count: its eager model's are float32."""
    recipe, dtypes = manifest.program.recipe, {state.dtype for state in manifest.states}
    own = traits(manifest.program.format)
    if own.decoder_is_rounded and any(not recipe[name].gathered for name in recipe.rounded):
        return "activations"
    if "int8" in dtypes:
        return "int8 rows"
    half = (
        own.half_arithmetic
        or any(one.part is not None and one.part.codes == "float16" for one in recipe.kept)
        or "float16" in dtypes
    )
    return "float16" if half else "nothing"


def check_same_source(manifest: Manifest, source: SourceSpec, config: ExportConfig) -> None:
    """Refuse to compare a bundle with weights it does not come from.

    Raises:
        BundleError: other files, or other quantisation of weights or caches, than the manifest records.
    """
    asked: list[tuple[str, object, object]] = [
        ("checkpoint files", source.files, manifest.source.files),
        ("cache.dtype", config.cache.caches, manifest.cache.caches),
    ]
    for program in manifest.programs:
        options = config.options(program.format).model_dump(mode="json")
        asked += [(f"{program.format}.{key}", options[key], value) for key, value in program.options.items()]
    for what, got, want in asked:
        if got != want:
            raise BundleError(
                f"bundle {manifest.name}",
                got=f"{what} {got} in the config",
                expected=f"{want}, as the manifest records",
                repair="Give the config this bundle was exported with.",
            )
