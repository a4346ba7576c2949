"""What a file with reduced weights is compared with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import GLOBAL, SLIDING, decoder_of, model
from toy import toy_manifest

from exporter import verification
from exporter.config import CheckpointConfig, ExportConfig
from exporter.errors import BundleError
from exporter.quantization.matrices import Storage, grids_of, store
from exporter.quantization.rounding import round_weights
from exporter.spec import CoreMLOptions, Format, Manifest


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
