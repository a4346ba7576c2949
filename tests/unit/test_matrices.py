"""Which matrix is kept on which grid, and the values that are left of it, from the definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from exporter.quantization.matrices import Storage, grids_of, store
from tiny_models import CONV, GLOBAL, MOE, SLIDING, decoder_of, model

from exporter.backends.coreai.options import CoreAIOptions
from exporter.backends.coreml.options import CoreMLOptions
from exporter.errors import ConfigError
from exporter.quantization import grids
from exporter.spec import KEEP_INT8

LINEARS = ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj", "mixer.o_proj",
           "feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj")  # fmt: skip
FOUR_BITS: list[tuple[str, str, str]] = [
    ("coreml", "int4", "int4"), ("coreml", "palettized4", "palettized4"), ("coreai", "int4", "int4_shifted"),
]  # fmt: skip


def matrix(rows: int = 48, columns: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("format", "weights", "grid"), FOUR_BITS)
def test_sensitive_matrices_keep_eight_bits_by_default(format: str, weights: str, grid: str) -> None:
    decoder = decoder_of(model(SLIDING, GLOBAL))
    found = grids_of(decoder, Storage(format, weights, KEEP_INT8[weights]))
    eight = {"embed_tokens.weight", "lm_head.weight"}
    eight |= {f"layers.{n}.{name}.weight" for n in (0, 1) for name in ("mixer.v_proj", "feed_forward.down_proj")}
    every = {"embed_tokens.weight", "lm_head.weight"} | {
        f"layers.{n}.{name}.weight" for n in (0, 1) for name in LINEARS
    }
    assert found == {name: "int8" if name in eight else grid for name in every}


@pytest.mark.parametrize(("format", "weights", "grid"), FOUR_BITS)
def test_the_matrices_of_eight_bits_are_the_callers_choice(format: str, weights: str, grid: str) -> None:
    decoder = decoder_of(model(SLIDING, GLOBAL))
    assert set(grids_of(decoder, Storage(format, weights, ())).values()) == {grid}
    found = grids_of(decoder, Storage(format, weights, ("layers.1.mixer",)))
    assert {name for name, own in found.items() if own == "int8"} == {
        f"layers.1.{name}.weight" for name in LINEARS if name.startswith("mixer")
    }


def test_a_tied_matrix_has_one_grid_and_either_of_its_names_keeps_it() -> None:
    tied, untied = (decoder_of(model(SLIDING, tie_word_embeddings=tied)) for tied in (True, False))
    for name in ("embed_tokens", "lm_head"):
        found = grids_of(tied, Storage("coreml", "int4", (name,)))
        assert found["embed_tokens.weight"] == found["lm_head.weight"] == "int8"
        found = grids_of(untied, Storage("coreml", "int4", (name,)))
        assert (found["embed_tokens.weight"], found["lm_head.weight"]) == (
            ("int8", "int4") if name == "embed_tokens" else ("int4", "int8")
        )


def test_what_is_no_matrix_of_its_own_is_left_alone() -> None:
    decoder = decoder_of(model(SLIDING, feed_forward=MOE))
    found = grids_of(decoder, Storage("coreai", "int8"))
    assert set(found) == {"embed_tokens.weight", "lm_head.weight"} | {f"layers.0.{n}.weight" for n in LINEARS[:4]}
    assert grids_of(decoder, Storage("coreml", "float16")) == grids_of(decoder, Storage("coreai", "float32")) == {}
    assert set(grids_of(decoder, Storage("coreai", "float16")).values()) == {"float16"}


def test_rows_that_are_no_whole_number_of_blocks_have_eight_bits() -> None:
    decoder = decoder_of(model(SLIDING, hidden_size=80, vocab_size=97))
    for format, weights, grid in FOUR_BITS:
        found = grids_of(decoder, Storage(format, weights, ()))
        assert found["layers.0.mixer.o_proj.weight"] == grid  # 64 columns
        assert found["layers.0.mixer.q_proj.weight"] == ("palettized4" if grid == "palettized4" else "int8")


def test_a_pattern_that_names_nothing_is_refused_unless_it_is_the_default() -> None:
    decoder = decoder_of(model(CONV, feed_forward=MOE))  # neither v_proj nor down_proj
    assert "int4" in grids_of(decoder, Storage("coreml", "int4", KEEP_INT8["int4"])).values()
    with pytest.raises(ConfigError, match=r"coreai\.keep_int8: got 'v_proj'"):
        grids_of(decoder, Storage("coreai", "int4", ("v_proj",)))


def test_options_bring_the_default_of_their_weights() -> None:
    assert CoreMLOptions(weights="palettized4").keep_int8 == KEEP_INT8["palettized4"]
    assert CoreAIOptions(weights="int4").keep_int8 == KEEP_INT8["int4"]
    assert CoreMLOptions().keep_int8 == CoreAIOptions(weights="int8").keep_int8 == ()
    assert CoreAIOptions(weights="int4", keep_int8=()).keep_int8 == ()
    with pytest.raises(ValueError, match="keep_int8 beside weights int4 or palettized4, not int8"):
        CoreMLOptions(weights="int8", keep_int8=("v_proj",))


def test_int8_is_the_grid_row_by_row() -> None:
    weight = matrix()
    integers, scales = grids.int8_per_row(weight)
    got = store(weight, "int8").values()
    for row, column in np.ndindex(48, 64):
        assert float(got[row, column]) == float(integers[row, column] * scales[row])


def test_int4_has_a_step_for_every_32_columns() -> None:
    weight = matrix()
    integers, scales = grids.int4_per_group(weight, 32)
    got = store(weight, "int4").values()
    for row, column in np.ndindex(48, 64):
        assert float(got[row, column]) == float(integers[row, column] * scales[row, column // 32])


def test_a_palette_has_16_values_for_a_row() -> None:
    weight = matrix()
    got = store(weight, "palettized4").values()
    for row in range(48):
        values = got[row].unique()
        assert len(values) <= 16
        nearest = values[(weight[row, :, None] - values).abs().argmin(-1)]
        # The middle between two entries decides; a weight there may go either way.
        assert (got[row] - nearest).abs().max() < 1e-3


def shifted_by_definition(group: np.ndarray) -> tuple[list[int], np.float32, int]:
    """16 levels from the smallest weight or 0 to the largest or 0. coreai-opt 0.3.0 adds 1e-6 to the range."""
    low, high = min(group.min(), np.float32(0)), max(group.max(), np.float32(0))
    scale = (high - low + np.float32(1e-6)) / np.float32(15)
    zero = int(np.clip(np.round((-8 * high - 7 * low) / (high - low + np.float32(1e-6))), -8, 7))
    return [int(np.clip(np.round(w / scale) + zero, -8, 7)) for w in group], scale, zero


def test_shifted_int4_covers_the_range_of_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("coreai_opt")
    weight = matrix(seed=1)
    weight[3] += 5  # all positive
    weight[4] = -weight[4].abs()
    weight[5] = 0
    codes, scales, zero_points = grids.int4_shifted_per_group(weight, 32)
    assert codes.dtype == zero_points.dtype == torch.int8 and codes.min() == -8 and codes.max() == 7
    for row, group in np.ndindex(48, 2):
        part = slice(32 * group, 32 * group + 32)
        want, scale, zero = shifted_by_definition(weight[row, part].numpy())
        assert codes[row, part].tolist() == want
        assert (float(scales[row, group]), int(zero_points[row, group])) == (float(scale), zero)
    stored = store(weight, "int4_shifted")
    for row, column in np.ndindex(48, 64):
        level = int(codes[row, column]) - int(zero_points[row, column // 32])
        assert float(stored.values()[row, column]) == float(np.float32(level) * scales[row, column // 32].numpy())
    monkeypatch.setattr(grids, "ELEMENTS_AT_A_TIME", 5 * 64)
    parts = grids.int4_shifted_per_group(weight, 32)
    assert all(torch.equal(a, b) for a, b in zip(parts, (codes, scales, zero_points), strict=True))
