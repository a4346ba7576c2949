"""Calibration and smoothing: what is observed is what the model feeds its linears, and folding changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tiny_models import (  # noqa: F401
    SPECS,
    attention,
    decoder_of,
    model,
    one_thread,
    play,
    randomize,
    states_of,
    token_ids,
)  # fmt: skip

from exporter.model.decoder import Decoder
from exporter.quantization import calibration, smoothing
from exporter.quantization.calibration import HEAD, observe, sites
from exporter.spec import MLPSpec

IDS = token_ids(60)
BIASED = model(
    attention(8, qkv_bias=True, output_bias=True), attention(None, qkv_bias=True),
    feed_forward=MLPSpec(intermediate_size=96, activation="silu", bias=True),
)  # fmt: skip
FAMILIES = {**SPECS, "biases": BIASED}


def in_two(site: str, channels: int) -> list[int]:
    return [channels // 3, channels - channels // 3]


def observed(
    decoder: Decoder, passages: Sequence[list[int]] = (IDS,), moments: bool = True
) -> dict[str, calibration.Inputs]:
    found = {}
    for n, inputs in observe(
        decoder, [torch.tensor([ids]) for ids in passages], in_two if moments else lambda _, channels: []
    ):
        found.update({name if n is None else f"layers.{n}.{name}": value for name, value in inputs.items()})
    return found


def fold(decoder: Decoder) -> dict[str, calibration.Inputs]:
    found = {}
    for n, inputs in observe(decoder, [torch.tensor([IDS])], in_two):
        if n is None:
            smoothing.fold_head(decoder, inputs[HEAD])
        else:
            smoothing.fold_layer(decoder.layers[n], inputs)
        found.update({name if n is None else f"layers.{n}.{name}": value for name, value in inputs.items()})
    return found


def whole(decoder: Decoder, ids: list[int] = IDS) -> dict[int, torch.Tensor]:
    return play(decoder, ids, [len(ids) - 3, 1, 2], states_of(decoder))


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_observed_is_what_each_passage_feeds_the_linears(name: str) -> None:
    """Both together, as if each were alone; longer than a ring."""
    passages = IDS[:13], IDS[13:]
    decoder = decoder_of(FAMILIES[name])
    fed: dict[str, list[torch.Tensor]] = {}
    linears = {f"layers.{n}.{site}" for n, layer in enumerate(decoder.layers) for site in sites(layer)} | {HEAD}
    for linear in linears:
        decoder.get_submodule(linear).register_forward_pre_hook(
            lambda _, arguments, linear=linear: fed.setdefault(linear, []).append(arguments[0][0])
        )
    for ids in passages:
        decoder.logits(decoder.hidden_states(torch.tensor([ids]), torch.zeros(1, len(ids)), states_of(decoder), False))
    for module in decoder.modules():
        module._forward_pre_hooks.clear()
    found = observed(decoder, passages)
    assert set(found) == linears
    for linear, inputs in found.items():
        x = torch.cat(fed[linear])
        torch.testing.assert_close(inputs.fourth, x.pow(4).mean(0), rtol=1e-3, atol=1e-9)
        for moments, own in zip(inputs.moments, x.split(in_two(linear, x.shape[1]), 1), strict=True):
            want = own.T @ own / len(IDS)
            torch.testing.assert_close(moments, want, rtol=1e-3, atol=1e-4 * float(want.abs().max()))
    assert all(not inputs.moments for inputs in observed(decoder, passages, moments=False).values())


@pytest.mark.parametrize("name", FAMILIES)
def test_the_folded_model_is_the_model(name: str) -> None:
    decoder = decoder_of(FAMILIES[name])
    before, norms = whole(decoder), [layer.input_norm.weight.clone() for layer in decoder.layers]
    found = fold(decoder)
    for position, logits in whole(decoder).items():
        assert torch.equal(logits, before[position]), "powers of two move no bit"
    moved = [not torch.equal(a, b.input_norm.weight) for a, b in zip(norms, decoder.layers, strict=True)]
    assert any(moved), "nothing was folded"
    after = observed(decoder)
    for linear, inputs in found.items():
        assert torch.equal(inputs.fourth, after[linear].fourth)
        assert len(inputs.moments) == 2
        assert all(torch.equal(*pair) for pair in zip(inputs.moments, after[linear].moments, strict=True))


def test_every_input_but_those_of_experts_is_smoothed_towards_its_weights() -> None:
    """An outlier in each linear's input is smaller afterwards, by about the share that ALPHA says."""
    spec = model(attention(8, num_key_value_heads=2), attention(None))
    decoder = decoder_of(spec)
    for layer in decoder.layers:
        layer.input_norm.weight[5] *= 100
        layer.feed_forward_norm.weight[7] *= 100
        layer.feed_forward.up_proj.weight[11] *= 100
        layer.mixer.v_proj.weight[3] *= 100
    decoder.norm.weight[2] *= 100

    def spread(inputs: calibration.Inputs) -> float:
        return float(inputs.fourth.max() / inputs.fourth.median()) ** 0.25

    before = {name: spread(inputs) for name, inputs in observed(decoder).items()}
    fold(decoder)
    for name, inputs in observed(decoder).items():
        assert spread(inputs) < 4 * before[name] ** (1 - smoothing.ALPHA), name
        assert before[name] > 10


def test_factors_are_powers_of_two_with_dead_channels_left_alone() -> None:
    sizes, energy = torch.tensor([0.0, 16.0, 1.0, 1e-3, 1.0]), torch.tensor([1.0, 1.0, 1.0, 0.0, 2.0**8])
    factors = smoothing._factors(sizes**4, energy)
    assert factors[0] == factors[3] == 1.0
    assert torch.equal(factors, factors.log2().round().exp2())
    assert factors[1] / factors[2] == 2.0 ** round(smoothing.ALPHA * 4)
    assert factors[2] / factors[4] == 2.0 ** round((1 - smoothing.ALPHA) * 4)
    assert torch.equal(smoothing._factors(torch.zeros(3), torch.ones(3)), torch.ones(3))


def test_an_untied_head_leaves_the_embedding_alone() -> None:
    decoder = decoder_of(model(attention(8), tie_word_embeddings=False))
    table = decoder.embed_tokens
    rows = table.weight.clone()
    fold(decoder)
    assert decoder.embed_tokens is table and torch.equal(table.weight, rows)


def test_a_model_over_int8_caches_is_observed_too() -> None:
    decoder = decoder_of(FAMILIES["config T"], dtype="int8")
    exact = observed(decoder_of(FAMILIES["config T"]))
    for name, inputs in observed(decoder).items():
        assert (inputs.fourth - exact[name].fourth).abs().max() < 0.2 * exact[name].fourth.max()
