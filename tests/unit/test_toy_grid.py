"""Grids that are one file each, put beside the others, are obeyed from the config to the bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from recipes import quantize_by, recipe_of
from tiny_models import GLOBAL, SLIDING, decoder_of, model, one_thread, token_ids  # noqa: F401
from toy_grids import toy_grids  # noqa: F401

from exporter.backends.coreai.options import CoreAIOptions
from exporter.backends.coreml.options import CoreMLOptions
from exporter.config import load_config
from exporter.errors import ConfigError
from exporter.quantization import QuantizedLinear
from exporter.quantization.rounding import round_weights
from exporter.spec import HEAD, QuantizationSpec, ReducedWeights

IDS = torch.tensor([token_ids(100, seed=5)])
SPEC = model(SLIDING, GLOBAL)


def test_they_are_words_of_every_config(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(
        "{name: m, checkpoint: {path: x}, executorch: {quantization: {linear: int6, head: ternary}}, "
        "coreml: {weights: ternary}, coreai: {weights: int6}}"
    )
    config = load_config(tmp_path / "model.yaml")
    for target in ("executorch", "coreml", "coreai"):
        assert not recipe_of(SPEC, config.options(target)).is_float32


def test_a_decoder_is_quantised_to_them() -> None:
    rules = QuantizationSpec(
        linear="int6", embedding="int8", head="ternary", keep_int8=("down_proj",), rounding="gptq", smooth=True
    )
    recipe = recipe_of(SPEC, rules)
    assert recipe.part("layers.0.mixer.q_proj.weight").model_dump() == {
        "grid": "int6", "codes": "int8", "scales": "float32", "gptq": True,
    }  # fmt: skip
    assert recipe.part(HEAD).model_dump() == {
        "grid": "ternary", "codes": "int4", "group_size": 32, "scales": "bfloat16"
    }  # fmt: skip
    decoder, nearest = decoder_of(SPEC), decoder_of(SPEC)
    quantize_by(rules, decoder, IDS)
    quantize_by(rules.model_copy(update={"rounding": "nearest"}), nearest, IDS)
    for name, module in decoder.named_modules():
        if isinstance(module, QuantizedLinear):
            largest = 127 if name.endswith("down_proj") else 1 if name == "lm_head" else 31
            codes = nearest.get_submodule(name).weight
            assert int(module.weight.abs().max()) == largest == int(codes.abs().max())
            assert torch.equal(module.weight, codes) == (name == "lm_head"), "GPTQ goes where it can"


@pytest.mark.parametrize(("section", "word"), [(CoreMLOptions, "int6"), (CoreAIOptions, "ternary")])
def test_weights_are_rounded_to_them(section: type[ReducedWeights], word: str) -> None:
    options = section(weights=word, keep_int8=("v_proj",))
    decoder, original = decoder_of(SPEC), decoder_of(SPEC)
    round_weights(decoder, recipe_of(SPEC, options))
    levels = {"int6": 31, "ternary": 1}[word]
    for name, weight in original.named_parameters():
        got = decoder.get_parameter(name).detach()
        if weight.ndim == 1:
            assert torch.equal(got, weight)
            continue
        width = weight.shape[1] if levels == 31 or "v_proj" in name else 32
        steps = 127 if "v_proj" in name else levels
        groups = weight.detach().numpy().reshape(len(weight), -1, width)
        scale = np.abs(groups).max(-1, keepdims=True) / steps
        scale = torch.from_numpy(scale).bfloat16().float().numpy() if width == 32 else scale
        want = np.clip(np.round(groups / scale), -steps, steps) * scale
        np.testing.assert_allclose(got.numpy().reshape(want.shape), want, rtol=0, atol=1.01 * scale.max() * 2**-20)


def test_bits_follow() -> None:
    recipe = recipe_of(SPEC, CoreMLOptions(weights="ternary", keep_int8=()))
    floats = sum(32 * p.numel() for p in decoder_of(SPEC).parameters() if p.ndim == 1)
    matrices = sum(p.numel() for p in decoder_of(SPEC).parameters() if p.ndim == 2)
    assert 8 * recipe.stored_bytes == floats + matrices * 4 + matrices // 32 * 16


def test_a_format_that_has_no_such_groups_refuses() -> None:
    with pytest.raises(
        ConfigError, match=r"executorch\.quantization\.linear: got 'palettized4'; .*: int4, int6, int8, ternary"
    ):
        recipe_of(SPEC, QuantizationSpec(linear="palettized4"))
