"""What a file with reduced weights is compared with, and how far from it it may be."""

from __future__ import annotations

import pytest
import torch
from tiny_models import GLOBAL, SLIDING, decoder_of, model
from toy import toy_manifest

from exporter import verify
from exporter.errors import VerificationError
from exporter.quantization.grids import int4_per_group, int8_per_row
from exporter.quantization.rounding import reduced, round_weights
from exporter.spec import Comparison, Format, Manifest


def matrix(rows: int = 48, columns: int = 64) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def test_int8_is_the_grid_row_by_row() -> None:
    weight = matrix()
    integers, scales = int8_per_row(weight)
    want = torch.tensor([[int(q) * float(s) for q in row] for row, s in zip(integers, scales, strict=True)])
    torch.testing.assert_close(reduced(weight, "int8"), want, rtol=1e-6, atol=0)


def test_int4_has_a_step_for_every_32_columns() -> None:
    weight = matrix()
    integers, scales = int4_per_group(weight, 32)
    got = reduced(weight, "int4")
    for row in range(48):
        for column in range(64):
            assert float(got[row, column]) == float(integers[row, column] * scales[row, column // 32])
    narrow = matrix(columns=40)  # no multiple of 32
    assert torch.equal(reduced(narrow, "int4"), reduced(narrow, "int8"))


def test_a_palette_has_16_values_for_a_row() -> None:
    weight = matrix()
    got = reduced(weight, "palettized4")
    for row in range(48):
        values = got[row].unique()
        assert len(values) <= 16
        nearest = values[(weight[row, :, None] - values).abs().argmin(-1)]
        # The middle between two entries decides; a weight there may go either way.
        assert (got[row] - nearest).abs().max() < 1e-3


@pytest.mark.parametrize("tied", [True, False])
def test_every_matrix_is_rounded_once_and_a_tied_one_stays_tied(tied: bool) -> None:
    decoder, float_decoder = (decoder_of(model(SLIDING, GLOBAL, tie_word_embeddings=tied)) for _ in range(2))
    round_weights(decoder, "int8")
    assert (decoder.lm_head.weight is decoder.embed_tokens.weight) == tied
    before = dict(float_decoder.named_parameters())
    for name, parameter in decoder.named_parameters():
        if parameter.dim() == 2 and parameter.numel() >= 1024:
            assert torch.equal(parameter, reduced(before[name], "int8")), name
        else:
            assert torch.equal(parameter, before[name]), name


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
    verify.judge([comparison(verify.EAGER, 0.2009), comparison(verify.FLOAT, 0.2199)], manifest, 0.1)
    with pytest.raises(VerificationError, match=r"against eager: .*expected mean KL divergence <= 0\.201"):
        verify.judge([comparison(verify.EAGER, 0.2011)], manifest, 0.1)
    for reference in (verify.FLOAT, verify.RECORDED, f"{verify.TRANSFORMERS}, chunks of 1"):
        with pytest.raises(VerificationError, match=r"expected mean KL divergence <= 0\.22"):
            verify.judge([comparison(reference, 0.2201)], manifest, 0.1)


def test_a_float32_program_is_held_to_the_logits_themselves() -> None:
    with pytest.raises(VerificationError, match=r"max \|difference\| <= 0\.01"):
        verify.judge([comparison(verify.EAGER, 0.0, "coreai")], of_format("coreai", "float32"), 0.1)


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
