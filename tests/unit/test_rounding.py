"""What a file with reduced weights is compared with, and how far from it it may be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import GLOBAL, SLIDING, decoder_of, model
from toy import toy_manifest

from exporter import verification
from exporter.config import CheckpointConfig, ExportConfig
from exporter.errors import BundleError, VerificationError
from exporter.quantization.matrices import Storage, grids_of, store
from exporter.quantization.rounding import round_weights
from exporter.spec import Comparison, CoreMLOptions, Format, Manifest


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "storage", [Storage("coreml", "int8"), Storage("coreml", "int4", ("v_proj", "lm_head")), Storage("coreai", "int4")]
)
def test_every_matrix_is_rounded_once_and_a_tied_one_stays_tied(storage: Storage, tied: bool) -> None:
    if storage.format == "coreai":
        pytest.importorskip("coreai_opt")
    decoder, float_decoder = (decoder_of(model(SLIDING, GLOBAL, tie_word_embeddings=tied)) for _ in range(2))
    round_weights(decoder, storage)
    assert (decoder.lm_head.weight is decoder.embed_tokens.weight) == tied
    before, kept = dict(float_decoder.named_parameters()), grids_of(float_decoder, storage)
    for name, parameter in decoder.named_parameters():
        want = store(before[name], kept[name]).values() if name in kept else before[name]
        assert torch.equal(parameter, want), name


def of_format(format: Format, weights: str) -> Manifest:
    manifest = toy_manifest()
    program = manifest.program.model_copy(update={"format": format, "weights": weights})
    return manifest.model_copy(update={"programs": (program,)})


def comparison(reference: str, divergence: float, format: Format = "coreml") -> Comparison:
    return Comparison(
        format=format, reference=reference, positions=9, max_abs_difference=1.0, mean_abs_difference=0.1,
        mean_kl_divergence=divergence, argmax_agreement=1.0,
    )  # fmt: skip


@pytest.mark.parametrize("weights", ["float16", "int4"])
def test_a_program_is_held_to_its_eager_model_and_to_the_float_one(weights: str) -> None:
    manifest = of_format("coreml", weights)
    verification.judge([comparison(verification.EAGER, 0.2009), comparison(verification.FLOAT, 0.2199)], manifest, 0.1)
    with pytest.raises(VerificationError, match=r"against eager: .*expected mean KL divergence <= 0\.201"):
        verification.judge([comparison(verification.EAGER, 0.2011)], manifest, 0.1)
    for reference in (verification.FLOAT, verification.RECORDED, f"{verification.TRANSFORMERS}, chunks of 1"):
        with pytest.raises(VerificationError, match=r"expected mean KL divergence <= 0\.22"):
            verification.judge([comparison(reference, 0.2201)], manifest, 0.1)


def test_a_float32_program_is_held_to_the_logits_themselves() -> None:
    with pytest.raises(VerificationError, match=r"max \|difference\| <= 0\.01"):
        verification.judge([comparison(verification.EAGER, 0.0, "coreai")], of_format("coreai", "float32"), 0.1)


def test_a_config_that_keeps_other_matrices_is_not_the_bundles(tmp_path: Path) -> None:
    manifest = of_format("coreml", "int4")
    kept = manifest.program.model_copy(update={"keep_int8": ("v_proj",)})
    manifest = manifest.model_copy(update={"programs": (kept,)})
    config = ExportConfig(
        name="toy",
        checkpoint=CheckpointConfig(path=tmp_path),
        quantization=manifest.quantization,
        coreml=CoreMLOptions(weights="int4", keep_int8=("v_proj",)),
    )
    verification.check_same_source(manifest, manifest.source, config)
    other = config.model_copy(update={"coreml": CoreMLOptions(weights="int4")})
    with pytest.raises(BundleError, match=r"got coreml\.keep_int8 \('embed_tokens', .* expected \('v_proj',\)"):
        verification.check_same_source(manifest, manifest.source, other)


def test_each_program_has_its_own_baseline() -> None:
    """A bundle's manifest holds the comparisons of every format; a program sees its own."""
    manifest = toy_manifest()
    other = of_format("coreml", "int4").program
    both = manifest.model_copy(
        update={
            "programs": (manifest.program, other),
            "verification": (
                comparison(verification.BASELINE, 0.3, "executorch"), comparison(verification.BASELINE, 0.7, "coreml"),
            ),
        }
    )  # fmt: skip
    assert verification.baseline_divergence(both.of("executorch").verification) == 0.3
    assert verification.baseline_divergence(both.of("coreml").verification) == 0.7
