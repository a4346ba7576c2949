"""The bounds, and what each of them is held to."""

from __future__ import annotations

from typing import Any

import pytest
from recipes import recipe_of
from toy import toy_manifest

from exporter.backends import traits
from exporter.errors import VerificationError
from exporter.spec import (
    CACHE_PROMISES,
    PRESETS,
    PROMISES,
    REDUCED_PROMISES,
    Comparison,
    FormatOptions,
    Manifest,
    QuantizationSpec,
    promise_of,
)
from exporter.verification import BASELINE, EAGER, FLOAT, RECORDED, TRANSFORMERS, judge
from exporter.verification.judge import BOUNDS, MODEL_MAX, Rounding, rounding_of

TEXTS = f"{TRANSFORMERS}, chunks of 1"


# The toy model has fewer channels than a group of the presets.
INT8 = {"linear": "int8", "embedding": "int8", "head": "int8", "smooth": True, "rounding": "gptq"}


def of(format: str = "executorch", dtype: str = "float32", **section: Any) -> Manifest:
    """A manifest whose program has states of that dtype, and weights as that section of the config says."""
    manifest = toy_manifest()
    options: FormatOptions = traits(format).options.model_validate(section)
    states = tuple(state.model_copy(update={"dtype": dtype}) for state in manifest.states)
    program = manifest.program.model_copy(
        update={
            "format": format, "options": options.model_dump(mode="json"), "states": states,
            "recipe": recipe_of(manifest.model, options),
            "max_kl_divergence": options.ceiling(state.dtype for state in states),
        }
    )  # fmt: skip
    return manifest.model_copy(update={"programs": (program,)})


def seen(reference: str, format: str | None = "executorch", **values: Any) -> Comparison:
    fields = {"largest_logit": 10.0, "max_abs_difference": 0.0, "mean_abs_difference": 0.0, "mean_kl_divergence": 0.0,
              "argmax_agreement": 1.0}  # fmt: skip
    return Comparison.model_validate({"format": format, "reference": reference, "positions": 9, **fields, **values})


def refused(comparison: Comparison, manifest: Manifest, *said: str) -> None:
    with pytest.raises(VerificationError) as caught:
        judge([comparison], manifest)
    for part in (f"verification against {comparison.reference}", *said):
        assert part in str(caught.value)


QUANTIZED = of(quantization=INT8)
MANIFESTS: dict[str, tuple[Manifest, Rounding]] = {
    "float": (of(), "nothing"),
    "half caches": (of(dtype="float16"), "float16"),
    "int8 caches": (of(dtype="int8"), "int8 rows"),
    "quantised": (QUANTIZED, "activations"),
    "quantised over int8 caches": (of(dtype="int8", quantization=INT8), "activations"),
    "a quantised embedding": (of(quantization=QuantizationSpec(embedding="int8")), "nothing"),
    "core ml": (of("coreml", "float16"), "float16"),
    "core ml's weights": (of("coreml", "float16", weights="int8"), "float16"),
    "core ai": (of("coreai", weights="int8"), "nothing"),
    "core ai's halves": (of("coreai", weights="float16"), "float16"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_program_is_held_to_its_own_eager_model(name: str) -> None:
    manifest, rounding = MANIFESTS[name]
    assert rounding_of(manifest) == rounding
    bounds, format = BOUNDS[rounding], manifest.program.format
    values = {"mean_kl_divergence": bounds.kl, "argmax_agreement": 1 - bounds.disagreement + 1e-9,
              "max_state_error": bounds.row, "mean_state_error": bounds.mean}  # fmt: skip
    good = seen(EAGER, format, worst_state="layer_1_keys, layer 1, row 3", **values)
    judge([good], manifest)
    for what, value, text in (
        ("mean_kl_divergence", 1.01 * bounds.kl, f"mean KL divergence <= {bounds.kl:.3g}"),
        ("argmax_agreement", 0.99 - bounds.disagreement, f"share of other first choices <= {bounds.disagreement:.3g}"),
        ("max_state_error", 1.01 * bounds.row, f"error of a row of state <= {bounds.row:.3g}"),
        ("mean_state_error", 1.01 * bounds.mean, f"mean error of rows of state <= {bounds.mean:.3g}"),
        ("mean_kl_divergence", float("nan"), "mean KL divergence nan"),
    ):
        refused(good.model_copy(update={what: value}), manifest, text, "(worst in layer_1_keys, layer 1, row 3)")


def test_what_rounds_is_as_near_to_its_eager_model_as_that_one_is_to_the_float_model() -> None:
    baseline = seen(BASELINE, mean_kl_divergence=0.002)
    for manifest in (QUANTIZED, of(dtype="int8")):
        judge([seen(EAGER, mean_kl_divergence=0.0041), baseline], manifest)
        with pytest.raises(VerificationError, match=r"against eager: got .*expected.* mean KL divergence <= 0.0041"):
            judge([seen(EAGER, mean_kl_divergence=0.0042), baseline], manifest)
        with pytest.raises(VerificationError, match=r"mean KL divergence <= 0\.05"):  # a poor quantiser allows no more
            judge([seen(EAGER, mean_kl_divergence=0.051), seen(BASELINE, mean_kl_divergence=0.04)], manifest)
    half = of("coreml", "float16", weights="int8")  # its arithmetic rounds, its eager model's does not
    judge([seen(EAGER, "coreml", mean_kl_divergence=0.01), seen(BASELINE, "coreml", mean_kl_divergence=1e-6)], half)


@pytest.mark.parametrize("reference", [FLOAT, BASELINE, RECORDED, TEXTS])
@pytest.mark.parametrize("name", [name for name in MANIFESTS if MANIFESTS[name][0].is_quantized])
def test_what_rounds_is_held_to_a_ceiling_that_it_does_not_set(name: str, reference: str) -> None:
    manifest = MANIFESTS[name][0]
    far = {"max_abs_difference": 9.0, "mean_abs_difference": 1.0, "argmax_agreement": 0.1}
    judge(
        [seen(reference, manifest.program.format, mean_kl_divergence=manifest.program.max_kl_divergence, **far)],
        manifest,
    )
    above = seen(
        reference, manifest.program.format, mean_kl_divergence=1.01 * manifest.program.max_kl_divergence, **far
    )
    refused(above, manifest, f"mean KL divergence <= {manifest.program.max_kl_divergence:.3g}")


@pytest.mark.parametrize("reference", [EAGER, RECORDED, TEXTS])
def test_a_program_of_floats_is_held_to_the_logits_themselves(reference: str) -> None:
    judge([seen(reference, max_abs_difference=0.01, mean_abs_difference=0.001)], of())
    refused(seen(reference, max_abs_difference=0.011), of(), "max |difference| <= 0.01")
    refused(seen(reference, mean_abs_difference=0.0011), of(), "mean |difference| <= 0.001")


def test_the_float_model_is_held_to_transformers_whatever_the_programs_round() -> None:
    for manifest in (of(), QUANTIZED, of("coreml", "float16", weights="int8")):
        judge([seen(TRANSFORMERS, None, max_abs_difference=10 * MODEL_MAX)], manifest)
        refused(seen(TRANSFORMERS, None, max_abs_difference=10.1 * MODEL_MAX), manifest, "/ largest logit")


def ceiling(format: str, dtype: str, **section: Any) -> float:
    options: FormatOptions = traits(format).options.model_validate(section)
    return options.ceiling(["float32", dtype])  # type: ignore[list-item]


def test_ceilings_are_those_of_the_weights_and_the_coarsest_cache() -> None:
    assert of().program.max_kl_divergence == 0 and not of().is_quantized
    for name in PRESETS:
        for dtype, cache in CACHE_PROMISES.items():
            assert ceiling("executorch", dtype, quantization=name) == PROMISES[name].max_kl + cache.max_kl
    for weights, promise in REDUCED_PROMISES.items():
        assert ceiling("coreml", "float16", weights=weights) == promise.max_kl + CACHE_PROMISES["float16"].max_kl
    assert ceiling("coreml", "float16", weights="int4", max_kl_divergence=0.07) == 0.07
    assert ceiling("executorch", "int8", quantization={"linear": "int8", "max_kl_divergence": 0.03}) == 0.03


ACCURATE, SMALL = PRESETS["accurate"], PRESETS["small"]


@pytest.mark.parametrize(
    ("spec", "nearest"),
    [
        *[(preset, name) for name, preset in PRESETS.items()],
        (ACCURATE.model_copy(update={"embedding": "none"}), "accurate"),
        (ACCURATE.model_copy(update={"linear": "none"}), "accurate"),
        (ACCURATE.model_copy(update={"head_exact_rows": 8192}), "accurate"),
        (ACCURATE.model_copy(update={"head_exact_rows": 2048}), "balanced"),
        (ACCURATE.model_copy(update={"head": "int8"}), "accurate"),
        (ACCURATE.model_copy(update={"head_exact_rows": 512}), "small"),  # finer presets alone
        (SMALL.model_copy(update={"keep_int8": (*SMALL.keep_int8, "o_proj")}), "small"),
        # Finer presets alone: the least strict.
        (ACCURATE.model_copy(update={"smooth": False}), "small"),
        (ACCURATE.model_copy(update={"rounding": "nearest"}), "small"),
        (SMALL.model_copy(update={"keep_int8": ()}), "small"),
        (SMALL.model_copy(update={"group_size": 64}), "small"),
        (QuantizationSpec(linear="int4", embedding="int4", head="int4"), "small"),
    ],
)
def test_a_mapping_without_a_ceiling_takes_the_nearest_presets(spec: QuantizationSpec, nearest: str) -> None:
    assert promise_of(spec) == PROMISES[nearest]


def test_stricter_presets_have_lower_ceilings() -> None:
    order = [PROMISES[name].max_kl for name in ("none", "accurate", "balanced", "small")]
    assert order == sorted(set(order)) and set(PROMISES) == set(PRESETS)
