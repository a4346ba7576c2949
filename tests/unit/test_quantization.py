"""Grids, quantised modules and the rules that place them, against NumPy computations from their definitions."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from recipes import quantize_by
from tiny_models import MOE, attention, decoder_of, model, one_thread, play, states_of, token_ids  # noqa: F401

from exporter.grids import base
from exporter.grids.int4 import int4_per_group
from exporter.grids.int8 import int8_per_row
from exporter.quantization import QuantizedEmbedding, QuantizedLinear
from exporter.quantization.modules import pack_nibbles
from exporter.spec import QuantizationSpec


def random_weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Round to nearest, ties to even, on the upper half of a float32's bits."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)


def nibble_error(group: np.ndarray, scale: float) -> float:
    codes = np.clip(np.round(group / scale), -8, 7)
    return float(((codes * scale - group) ** 2).sum())


def test_int8_is_the_nearest_code_under_the_largest_weights_scale() -> None:
    weight = random_weight(9, 40)
    weight[3] *= 1e4
    weight[4] *= 1e-6
    codes, scales = int8_per_row(weight)
    assert codes.dtype == torch.int8 and scales.dtype == torch.float32 and scales.shape == (9,)
    assert torch.equal(scales, weight.abs().amax(1) / 127)
    for row, row_codes, scale in zip(weight.numpy(), codes.numpy(), scales.numpy(), strict=True):
        assert np.abs(row_codes).max() == 127
        for value, code in zip(row, row_codes, strict=True):
            distances = [abs(float(value) - float(scale) * c) for c in range(-127, 128)]
            assert abs(float(value) - float(scale) * code) <= min(distances) + 1e-6 * abs(float(scale))


def test_int8_of_zeros_and_of_more_rows_than_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, scales = int8_per_row(torch.zeros(2, 8))
    assert not codes.any() and (scales > 0).all()
    weight = random_weight(11, 64)
    whole = [*int8_per_row(weight), *int4_per_group(weight, 32)]
    monkeypatch.setattr(base, "ELEMENTS_AT_A_TIME", 4 * 64)
    parts = [*int8_per_row(weight), *int4_per_group(weight, 32)]
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("outlier", [1.0, 8.0])
def test_int4_is_the_best_of_its_scales_and_never_worse_than_plain_rounding(group_size: int, outlier: float) -> None:
    weight = random_weight(6, 128)
    weight[:, 5] *= outlier
    codes, scales = int4_per_group(weight, group_size)
    assert codes.dtype == torch.int8 and codes.shape == weight.shape and scales.shape == (6, 128 // group_size)
    assert codes.min() >= -8 and codes.max() <= 7 and (codes.min() == -8 or codes.max() == 7)
    assert np.array_equal(bfloat16(scales.numpy()), scales.numpy()), "XNNPACK stores scales in bfloat16"
    for row, group in itertools.product(range(6), range(128 // group_size)):
        columns = slice(group * group_size, (group + 1) * group_size)
        values, scale = weight[row, columns].numpy().astype(np.float64), float(scales[row, group])
        error = float(((codes[row, columns].numpy() * scale - values) ** 2).sum())
        assert error == pytest.approx(nibble_error(values, scale), rel=1e-6), "codes are not the nearest"
        largest = np.abs(values).max()
        plain = float(bfloat16(np.array([largest / 7]))[0])
        assert error <= nibble_error(values, plain) * (1 + 1e-6)
        searched = bfloat16(largest / np.linspace(5.9, 8.9, 24))
        assert error <= min(nibble_error(values, float(s)) for s in searched) * (1 + 1e-5)


def test_int4_of_zeros_and_of_what_the_grid_holds_exactly() -> None:
    codes, scales = int4_per_group(torch.zeros(2, 32), 32)
    assert not codes.any() and (scales > 0).all()
    exact = (torch.arange(32) % 16 - 8).float().expand(2, 32) * 0.25
    codes, scales = int4_per_group(exact, 32)
    assert torch.isfinite(scales).all()
    assert ((codes * scales - exact).square().sum(1) <= 32 * 0.25**2 / 12).all()


@pytest.mark.parametrize("shape", [(1, 2), (5, 16), (97, 64)])
def test_nibbles_round_trip(shape: tuple[int, int]) -> None:
    codes = torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(0)).to(torch.int8)
    packed = pack_nibbles(codes)
    assert packed.dtype == torch.uint8 and packed.shape == (shape[0], shape[1] // 2)
    low, high = packed.numpy() & 15, packed.numpy() >> 4
    unpacked = np.stack([low, high], -1).reshape(shape).astype(np.int64) - 8
    assert np.array_equal(unpacked, codes.numpy())


def linear_by_definition(x: np.ndarray, module: QuantizedLinear) -> np.ndarray:
    """Each token on its own asymmetric int8 grid, which always holds 0, times the dequantised weight."""
    weight = module.weight.numpy().astype(np.float64)
    scales = module.scales.numpy().astype(np.float64)
    width = weight.shape[1] if module.group_size is None else module.group_size
    weight = weight * np.repeat(scales.reshape(len(weight), -1), width, axis=1)
    tokens = []
    for token in x:
        low, high = min(token.min(), np.float32(0)), max(token.max(), np.float32(0))
        scale = np.float32((high - low) / np.float32(255))
        zero_point = np.clip(np.round(-128 - low / scale), -128, 127)
        codes = np.clip(np.round(token / scale) + zero_point, -128, 127)
        tokens.append((codes - zero_point).astype(np.float64) * scale @ weight.T)
    bias = 0.0 if module.bias is None else module.bias.numpy()
    return np.stack(tokens) + bias


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("group_size", [None, 32, 64])
def test_quantised_linear(bias: bool, group_size: int | None) -> None:
    weight = random_weight(10, 64)
    grid = int8_per_row(weight) if group_size is None else int4_per_group(weight, group_size)
    module = QuantizedLinear(*grid, random_weight(1, 10)[0] if bias else None, group_size)
    x = random_weight(7, 64, seed=3)
    x[1], x[2] = x[1].abs(), -x[2].abs()
    x[3] = x[3] * 100 + 50
    with torch.no_grad():
        got = module(x[None])[0].numpy()
    expected = linear_by_definition(x.numpy(), module)
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=2e-6 * np.abs(expected).max())
    exact = x @ weight.T + (module.bias if bias else 0.0)
    relative = (torch.from_numpy(got) - exact).norm(dim=1) / exact.norm(dim=1)
    assert relative.max() < (0.02 if group_size is None else 0.25)


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_embedding_rows_are_exactly_those_of_the_dequantised_table(bits: str) -> None:
    weight = random_weight(97, 64)
    if bits == "int8":
        codes, scales = int8_per_row(weight)
        module = QuantizedEmbedding(codes, scales[:, None])
        table = codes.numpy().astype(np.float32) * scales.numpy()[:, None]
    else:
        codes, scales = int4_per_group(weight, 32)
        module = QuantizedEmbedding(pack_nibbles(codes), scales)
        table = codes.numpy().astype(np.float32) * np.repeat(scales.numpy(), 32, axis=1)
    ids = [*range(97), 3, 3, 0]
    assert np.array_equal(module(torch.tensor([ids]))[0].numpy(), table[ids])


def quantized(spec: Any = None, **rules: Any) -> Any:
    decoder = decoder_of(spec or model(attention(8), attention(None)))
    quantize_by(QuantizationSpec(**rules), decoder)
    return decoder


def kinds(decoder: Any) -> dict[str, str]:
    """Linears and tables by name: float, int8 or int4."""
    found = {}
    for name, module in decoder.named_modules():
        if isinstance(module, QuantizedLinear):
            found[name] = "int8" if module.group_size is None else "int4"
        elif isinstance(module, QuantizedEmbedding):
            found[name] = "int8" if module.weight.dtype == torch.int8 else "int4"
        elif isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            found[name] = "float"
    return found


def test_rules_place_each_grid_where_they_say() -> None:
    assert set(kinds(quantized()).values()) == {"float"}
    found = kinds(quantized(linear="int4", embedding="int8", keep_int8=("down_proj", "layers.0.mixer.v_proj")))
    for name, kind in found.items():
        if name.endswith("down_proj") or name in ("layers.0.mixer.v_proj", "embed_tokens"):
            assert kind == "int8", name
        else:
            assert kind == ("float" if name == "lm_head" else "int4"), name
    assert sum(name.startswith("layers.") for name in found) == 2 * 7


def test_routers_and_stacked_experts_stay_float() -> None:
    decoder = quantized(model(attention(8), feed_forward=MOE), linear="int8")
    assert kinds(decoder)["layers.0.feed_forward.router"] == "float"
    assert decoder.layers[0].feed_forward.experts.gate_proj.dtype == torch.float32


def test_biases_survive() -> None:
    spec = model(attention(8, qkv_bias=True))
    decoder = quantized(spec, linear="int8")
    assert torch.equal(decoder.layers[0].mixer.k_proj.bias, decoder_of(spec).layers[0].mixer.k_proj.bias)
    assert decoder.layers[0].mixer.o_proj.bias is None


def test_a_tied_int8_head_is_the_embeddings_own_table() -> None:
    tied = quantized(embedding="int8", head="int8")
    assert tied.lm_head.weight is tied.embed_tokens.weight
    assert torch.equal(tied.lm_head.scales, tied.embed_tokens.scales[:, 0])
    assert tied.lm_head.scales.data_ptr() == tied.embed_tokens.scales.data_ptr()
    untied = quantized(model(attention(8), tie_word_embeddings=False), embedding="int8", head="int8")
    assert not torch.equal(untied.lm_head.weight, untied.embed_tokens.weight)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("embedding", "head"), itertools.product(["none", "int8", "int4"], repeat=2))
def test_embedding_and_head_come_from_the_float_weights_whatever_the_other_is(
    embedding: str, head: str, tied: bool
) -> None:
    spec = model(attention(8), attention(None), tie_word_embeddings=tied)
    original, decoder = decoder_of(spec), quantized(spec, embedding=embedding, head=head)
    if tied and embedding == "int4" and head == "int8":
        embedding = "int8"  # a tied table is stored once, as the head has it
    planes = tied and embedding == "int8" and head == "int4"  # two of four bits, in place of eight
    if not planes:
        assert kinds(decoder)["embed_tokens"] == embedding.replace("none", "float")
    assert kinds(decoder)["lm_head"] == head.replace("none", "float")
    table = decoder.embed_tokens(torch.arange(97)[None])[0].detach()
    head_weight = decoder.lm_head.weight.detach() if head == "none" else decoder.lm_head.dequantized()
    step = {"none": 0.0, "int8": 1 / 50 if planes else 1 / 127, "int4": 1 / 5.9}
    own = original.embed_tokens.weight.detach(), original.lm_head.weight.detach()
    for weight, got, bits in zip(own, (table, head_weight), (embedding, head), strict=True):
        assert ((got - weight).abs().amax(1) <= step[bits] * weight.abs().amax(1)).all()
        assert torch.equal(got, weight) == (bits == "none")


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_a_quantised_decoder_says_the_same_in_any_split(bits: str) -> None:
    ids = token_ids(20)
    exact = play(decoder := decoder_of(model(attention(8), attention(None))), ids, [20], states_of(decoder))[19]
    decoder = quantized(linear=bits, embedding=bits, head=bits)
    whole = play(decoder, ids, [20], states_of(decoder))[19]
    for splits in ([1] * 4 + [16], [7, 1, 11, 1]):
        logits = play(decoder, ids, splits, states_of(decoder, float("nan")))[19]
        # A float32 rounding may carry an activation over to the next of its 256 codes.
        assert (logits - whole).abs().max() < 5e-3 * whole.abs().max()
    assert 0 < (whole - exact).abs().max() < (0.1 if bits == "int8" else 0.7) * exact.abs().max()
