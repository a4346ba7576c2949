"""What a file with reduced weights is compared with, and how far from it it may be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from recipes import recipe_of
from tiny_models import GLOBAL, SLIDING, decoder_of, model
from toy import toy_manifest

from exporter import verify
from exporter.backends import traits
from exporter.backends.coreai.options import CoreAIOptions
from exporter.backends.coreml.options import CoreMLOptions
from exporter.config import CONFIG, CheckpointConfig
from exporter.errors import BundleError, VerificationError
from exporter.grids.base import store
from exporter.quantization.rounding import round_weights
from exporter.spec import Comparison, Manifest, ReducedWeights


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        CoreMLOptions(weights="int8"),
        CoreMLOptions(weights="int4", keep_int8=("v_proj", "lm_head")),
        CoreMLOptions(),
        CoreAIOptions(weights="int4"),
        CoreAIOptions(),
    ],
)
def test_every_matrix_is_rounded_once_and_a_tied_one_stays_tied(options: ReducedWeights, tied: bool) -> None:
    """On integers and palettes; half precision is compared with the float model itself."""
    if options == CoreAIOptions(weights="int4"):
        pytest.importorskip("coreai_opt")
    decoder, float_decoder = (decoder_of(model(SLIDING, GLOBAL, tie_word_embeddings=tied)) for _ in range(2))
    recipe = recipe_of(decoder.spec, options)
    round_weights(decoder, recipe)
    assert (decoder.lm_head.weight is decoder.embed_tokens.weight) == tied
    for name, weight in float_decoder.named_parameters():
        kept = recipe.grid(name)
        reduced = weight.ndim == 2 and name.endswith(".weight") and options.weights != "float16"
        assert kept.is_float != reduced
        want = store(weight, kept).values() if reduced else weight
        assert torch.equal(decoder.get_parameter(name), want), name


def of_format(format: str, weights: str) -> Manifest:
    manifest = toy_manifest()
    options = traits(format).options(weights=weights)
    recipe = recipe_of(manifest.model, options)
    program = manifest.program.model_copy(
        update={
            "format": format, "options": options.model_dump(mode="json"), "weights": options.described(recipe),
            "recipe": recipe,
        }
    )  # fmt: skip
    return manifest.model_copy(update={"programs": (program,)})


def comparison(reference: str, divergence: float, format: str = "coreml") -> Comparison:
    return Comparison(
        format=format, reference=reference, positions=9, max_abs_difference=1.0, mean_abs_difference=0.1,
        mean_kl_divergence=divergence, argmax_agreement=1.0,
    )  # fmt: skip


@pytest.mark.parametrize("weights", ["float16", "int4"])
def test_a_program_is_held_to_its_eager_model_and_to_the_float_one(weights: str) -> None:
    manifest = of_format("coreml", weights)
    verify.judge([comparison(verify.EAGER, 0.2009), comparison(verify.FLOAT, 0.2199)], manifest, 0.1)
    with pytest.raises(VerificationError, match=r"against eager: .*expected mean KL divergence <= 0\.201"):
        verify.judge([comparison(verify.EAGER, 0.2011)], manifest, 0.1)
    for reference in (verify.FLOAT, verify.RECORDED, f"{verify.TRANSFORMERS}, chunks of 1"):
        with pytest.raises(VerificationError, match=r"expected mean KL divergence <= 0\.22"):
            verify.judge([comparison(reference, 0.2201)], manifest, 0.1)


def test_a_float32_program_is_held_to_the_logits_themselves() -> None:
    with pytest.raises(VerificationError, match=r"max \|difference\| <= 0\.01"):
        verify.judge([comparison(verify.EAGER, 0.0, "coreai")], of_format("coreai", "float32"), 0.1)


def test_a_config_that_keeps_other_matrices_is_not_the_bundles(tmp_path: Path) -> None:
    manifest = of_format("coreml", "int4")
    options = CoreMLOptions(weights="int4", keep_int8=("v_proj",))
    kept = manifest.program.model_copy(update={"options": options.model_dump(mode="json")})
    manifest = manifest.model_copy(update={"programs": (kept,)})
    config = CONFIG.model_validate({"name": "toy", "checkpoint": CheckpointConfig(path=tmp_path), "coreml": options})
    verify.check_same_source(manifest, manifest.source, config)
    other = config.model_copy(update={"coreml": CoreMLOptions(weights="int4")})
    with pytest.raises(BundleError, match=r"got coreml\.keep_int8 \['embed_tokens', .* expected \['v_proj'\]"):
        verify.check_same_source(manifest, manifest.source, other)


def test_each_program_has_its_own_baseline() -> None:
    """A bundle's manifest holds the comparisons of every format; a program sees its own."""
    manifest = toy_manifest()
    other = of_format("coreml", "int4").program
    both = manifest.model_copy(
        update={
            "programs": (manifest.program, other),
            "verification": (
                comparison(verify.BASELINE, 0.3, "executorch"), comparison(verify.BASELINE, 0.7, "coreml"),
            ),
        }
    )  # fmt: skip
    assert verify.baseline_divergence(both.of("executorch").verification) == 0.3
    assert verify.baseline_divergence(both.of("coreml").verification) == 0.7
