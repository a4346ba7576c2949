"""What a file with reduced weights is compared with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from recipes import recipe_of
from tiny_models import GLOBAL, SLIDING, decoder_of, model
from toy import toy_manifest

from exporter import verification
from exporter.backends import traits
from exporter.backends.coreai.options import CoreAIOptions
from exporter.backends.coreml.options import CoreMLOptions
from exporter.config import CONFIG, CheckpointConfig
from exporter.errors import BundleError
from exporter.grids.base import store
from exporter.quantization.rounding import round_weights
from exporter.spec import Manifest, ReducedWeights


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
        kept = recipe.part(name)
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


def test_a_config_that_keeps_other_matrices_is_not_the_bundles(tmp_path: Path) -> None:
    manifest = of_format("coreml", "int4")
    options = CoreMLOptions(weights="int4", keep_int8=("v_proj",))
    kept = manifest.program.model_copy(update={"options": options.model_dump(mode="json")})
    manifest = manifest.model_copy(update={"programs": (kept,)})
    config = CONFIG.model_validate({"name": "toy", "checkpoint": CheckpointConfig(path=tmp_path), "coreml": options})
    verification.check_same_source(manifest, manifest.source, config)
    other = config.model_copy(update={"coreml": CoreMLOptions(weights="int4")})
    with pytest.raises(BundleError, match=r"got coreml\.keep_int8 \['embed_tokens', .* expected \['v_proj'\]"):
        verification.check_same_source(manifest, manifest.source, other)
