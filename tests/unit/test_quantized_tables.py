"""Presets and mixed tables on tiny models: which bytes embedding and head share, and what each says."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from executorch.backends.xnnpack.operators.node_visitor import NodeVisitor
from recipes import quantize_by, recipe_of
from tiny_models import (  # noqa: F401
    MLP,
    MOE,
    SPECS,
    attention,
    decoder_of,
    model,
    one_thread,
    play,
    states_of,
    token_ids,
)  # fmt: skip

from exporter.backends.executorch.options import ExecutorchOptions
from exporter.errors import ConfigError
from exporter.model.decoder import Decoder
from exporter.quantization import QuantizedEmbedding, QuantizedLinear, SplitEmbedding, SplitLinear
from exporter.quantization.modules import ScaledEmbedding, pack_nibbles
from exporter.spec import PRESETS, MLPSpec, ModelSpec, QuantizationSpec

IDS = torch.tensor([token_ids(150, seed=5)])
ROWS = 40
TIED = model(attention(8), attention(None))
MIXED = QuantizationSpec(
    linear="int8", embedding="int8", head="int4", smooth=True, rounding="gptq", head_int8_rows=ROWS
)


def quantized(model_spec: ModelSpec, spec: QuantizationSpec) -> Decoder:
    decoder = decoder_of(model_spec)
    quantize_by(spec, decoder, IDS)
    return decoder


def logits_of(decoder: Decoder) -> torch.Tensor:
    return play(decoder, token_ids(20), [20], states_of(decoder))[19]


def test_a_mixed_table_is_stored_once() -> None:
    decoder = quantized(TIED, MIXED)
    scaled, head = decoder.embed_tokens, decoder.lm_head
    assert isinstance(scaled, ScaledEmbedding) and isinstance(head, SplitLinear)
    table = scaled.table
    assert isinstance(table, SplitEmbedding)
    first, others = head.parts
    assert first.weight.shape == (ROWS, 64) and others.weight.shape == (97 - ROWS, 64)
    assert table.first.weight.data_ptr() == first.weight.data_ptr()
    assert table.first.scales.data_ptr() == first.scales.data_ptr()
    assert torch.equal(table.others.weight, NodeVisitor.convert_to_qc4w(others.weight)), "XNNPACK's bytes"
    assert table.others.scales.dtype == torch.bfloat16
    assert torch.equal(table.others.scales.float(), others.scales)


def test_nibbles_are_packed_as_xnnpack_packs_them() -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(3, 2)
    assert torch.equal(pack_nibbles(codes), NodeVisitor.convert_to_qc4w(codes))


def test_rows_of_a_mixed_embedding_are_those_of_the_float_table_to_some_seven_bits() -> None:
    original = decoder_of(TIED).embed_tokens.weight.detach()
    decoder = quantized(TIED, MIXED)
    rows = decoder.embed_tokens(torch.arange(97)[None])[0]
    assert decoder.embed_tokens(torch.tensor([[3, 96, 40, 39, 3]]))[0].equal(rows[[3, 96, 40, 39, 3]])
    error = (rows - original).norm(dim=1) / original.norm(dim=1)
    assert error[:ROWS].max() < 0.015 and error[ROWS:].max() < 0.03
    table = decoder.embed_tokens.table
    without = copy.deepcopy(table.others)
    without.residual = None
    factors = decoder.embed_tokens.factors
    coarse = without(torch.arange(97 - ROWS)[None])[0] * factors
    coarse_error = (coarse - original[ROWS:]).norm(dim=1) / original[ROWS:].norm(dim=1)
    assert (coarse_error > 5 * error[ROWS:]).all()


def test_a_residual_by_its_definition() -> None:
    decoder = quantized(TIED, MIXED)
    table = decoder.embed_tokens.table.others
    original = decoder_of(TIED).embed_tokens.weight.detach()[ROWS:] / decoder.embed_tokens.factors
    four_bits = decoder.lm_head.parts[1].dequantized()
    left = (original - four_bits).numpy().reshape(-1, 2, 32)
    packed = table.residual.weight.numpy()
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(left.shape).astype(np.float32) - 8
    scales = table.residual.scales.float().numpy()[..., None]
    assert np.abs(codes * scales - left).max() <= (scales / 2 * 1.01).max()
    assert (np.abs(codes * scales - left) <= scales * 0.51).all()
    np.testing.assert_allclose(scales[..., 0], np.abs(left).max(-1) / 7, rtol=2**-8)
    got = table(torch.arange(97 - ROWS)[None])[0]
    np.testing.assert_array_equal(got.numpy(), four_bits.numpy() + (codes * scales).reshape(-1, 64))


def test_logits_of_a_mixed_head_are_those_of_its_parts() -> None:
    head = quantized(TIED, MIXED).lm_head
    x = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(head(x), torch.cat([head.parts[0](x), head.parts[1](x)], -1))
    assert head(x).shape == (1, 3, 97) and head.dequantized().shape == (97, 64)


@pytest.mark.parametrize("preset", ["accurate", "balanced", "small"])
@pytest.mark.parametrize("name", ["config T", "gemma", "short convolution", "untied"])
def test_presets_are_close_to_the_float_model(name: str, preset: str) -> None:
    """Also where the head has fewer rows than a preset keeps in eight bits, and where it is not tied."""
    spec = model(attention(8), attention(None), tie_word_embeddings=False) if name == "untied" else SPECS[name]
    exact, decoder = logits_of(decoder_of(spec)), quantized(spec, PRESETS[preset])
    error = (logits_of(decoder) - exact).norm() / exact.norm()
    assert 1e-4 < error < {"accurate": 0.15, "balanced": 0.15, "small": 0.9}[preset]
    assert not [m for m in decoder.modules() if isinstance(m, torch.nn.Linear | torch.nn.Embedding)]
    again = quantized(spec, PRESETS[preset])
    for (key, ours), (other, theirs) in zip(decoder.state_dict().items(), again.state_dict().items(), strict=True):
        assert key == other and torch.equal(ours, theirs), key


INT4 = {"accurate": set(), "balanced": set(), "small": {"q_proj", "o_proj", "gate_proj", "up_proj"}}


@pytest.mark.parametrize("preset", INT4)
def test_presets_give_four_bits_to_these_matrices_and_take_models_without_some(preset: str) -> None:
    for spec in (TIED, SPECS["short convolution"], model(attention(8), feed_forward=MOE)):
        named = [
            (name.rpartition(".")[2], module)
            for name, module in quantized(spec, PRESETS[preset]).named_modules()
            if isinstance(module, QuantizedLinear) and name.startswith("layers.")
        ]
        own = INT4[preset] | ({"in_proj", "out_proj"} if preset == "small" else set())
        assert {name for name, module in named if module.group_size is not None} == own & {name for name, _ in named}


def test_more_int8_rows_than_the_vocabulary_has_are_an_int8_head() -> None:
    decoder = quantized(TIED, PRESETS["balanced"])
    assert isinstance(decoder.lm_head, QuantizedLinear) and decoder.lm_head.group_size is None
    assert decoder.embed_tokens.table.weight is decoder.lm_head.weight


def test_gptq_is_used_where_it_is_asked_for_and_follows_the_inputs() -> None:
    rules: dict[str, Any] = {"linear": "int4", "head": "int4", "keep_int8": ("v_proj",)}
    nearest = quantized(TIED, QuantizationSpec(**rules))
    gptq = quantized(TIED, QuantizationSpec(**rules, rounding="gptq"))
    for name, module in nearest.named_modules():
        if isinstance(module, QuantizedLinear):
            assert not torch.equal(module.weight, gptq.get_submodule(name).weight), name
            same_scales = torch.equal(module.scales, gptq.get_submodule(name).scales)
            assert same_scales == name.endswith("v_proj"), name  # int8's are those of the largest weights
    other = decoder_of(TIED)
    quantize_by(QuantizationSpec(**rules, rounding="gptq"), other, IDS.flip(1))
    assert not torch.equal(other.lm_head.weight, gptq.lm_head.weight)


@pytest.mark.parametrize(
    ("rules", "parts"),
    [
        ({"linear": "int8"}, {"layers"}),
        ({"head": "int4"}, {"lm_head"}),
        ({"head": "int8", "embedding": "int8"}, {"lm_head", "embed_tokens"}),
    ],
)
def test_gptq_of_the_one_leaves_the_other_as_it_is(rules: dict[str, Any], parts: set[str]) -> None:
    gptq, nearest = (quantized(TIED, QuantizationSpec(**rules, rounding=rounding)) for rounding in ("gptq", "nearest"))
    changed = {
        name.partition(".")[0]
        for name, buffer in nearest.state_dict().items()
        if not torch.equal(buffer, gptq.state_dict()[name])
    }
    assert changed == parts


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"smooth": True}, "quantised linear or head for smooth"),
        ({"rounding": "gptq", "embedding": "int8"}, "quantised linear or head for rounding gptq"),
        ({"head": "int8", "head_int8_rows": 8}, "head int4 for head_int8_rows"),
        ({"head": "int4", "head_int8_rows": -1}, "greater than or equal to 0"),
    ],
)
def test_rules_that_nothing_would_follow_are_refused(rules: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        QuantizationSpec(**rules)


def test_a_group_that_does_not_divide_is_refused_before_any_work() -> None:
    spec = model(attention(8), hidden_size=48, vocab_size=50)
    with pytest.raises(ConfigError, match="32 for lm_head with 48 input channels"):
        quantize_by(QuantizationSpec(linear="int8", head="int4", smooth=True), decoder_of(spec))


def test_int8_has_no_groups_by_gptq_either() -> None:
    spec = model(attention(8), hidden_size=48)
    decoder = quantized(spec, QuantizationSpec(linear="int8", head="int8", rounding="gptq"))
    float_logits, logits = logits_of(decoder_of(spec)), logits_of(decoder)
    assert float((logits - float_logits).norm() / float_logits.norm()) < 0.02


def bytes_stored(decoder: Decoder) -> int:
    """Of a quantised decoder as a file has them: each content once, 4-bit codes in nibbles, the scales of 4-bit linears
    in bfloat16. The factors of a smoothed embedding are no weights."""
    contents: set[tuple[str, bytes]] = set()

    def holds(kind: str, *tensors: torch.Tensor) -> None:
        contents.update((kind, tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()) for tensor in tensors)

    for module in decoder.modules():
        if isinstance(module, QuantizedLinear):
            codes, scales = module.weight, module.scales
            if module.group_size is not None:
                codes, scales = pack_nibbles(codes), scales.bfloat16()
            holds("codes", codes)
            holds("scales", scales)
            holds("floats", *([] if module.bias is None else [module.bias]))
        elif isinstance(module, QuantizedEmbedding):
            holds("codes", module.weight)
            holds("scales", module.scales)
    holds("floats", *decoder.parameters())
    return sum(len(content) for _, content in contents)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "rules",
    [
        QuantizationSpec(), MIXED, PRESETS["accurate"], PRESETS["small"], QuantizationSpec(head="int8"),
        QuantizationSpec(embedding="int4"), QuantizationSpec(head="int4", embedding="int8"),
        QuantizationSpec(linear="int4", head="int4", embedding="int4", group_size=64),
        QuantizationSpec(head="int8", embedding="int4"), QuantizationSpec(head="int4"),
    ],
)  # fmt: skip
def test_a_recipe_counts_the_bytes_that_were_made(rules: QuantizationSpec, tied: bool) -> None:
    spec = model(attention(8, qkv_bias=True), feed_forward=MLPSpec(intermediate_size=128, activation="silu"),
                 tie_word_embeddings=tied)  # fmt: skip
    recipe = recipe_of(spec, rules)
    decoder = quantized(spec, rules)
    assert recipe.stored_bytes == bytes_stored(decoder)
    own = decoder.embed_tokens.table if isinstance(decoder.embed_tokens, ScaledEmbedding) else decoder.embed_tokens
    elsewhere = {tensor.data_ptr() for tensor in (*decoder.lm_head.parameters(), *decoder.lm_head.buffers())}
    nibbles = [pack_nibbles(m.weight) for m in decoder.lm_head.modules() if isinstance(m, QuantizedLinear)]
    shared = [weight for weight in nibbles for m in own.modules() if isinstance(m, QuantizedEmbedding)
              and m.weight.dtype == torch.uint8 and torch.equal(m.weight, weight)]  # fmt: skip
    beside = sum(t.nbytes for t in (*own.parameters(), *own.buffers()) if t.data_ptr() not in elsewhere)
    beside -= sum(weight.nbytes + weight.numel() * 2 // rules.group_size * 2 for weight in shared)
    assert recipe.unread_bytes == beside


def test_bits_a_weight() -> None:
    """By hand: one layer of 64 channels, 4 heads of 16, 2 KV heads, 96 inner channels, 97 rows of vocabulary."""
    linears = [(64, 64), (32, 64), (32, 64), (64, 64), (96, 64), (96, 64), (64, 96)]
    matrices, table, norms = sum(n * k for n, k in linears), 97 * 64, 3 * 64
    everything = matrices + table + norms
    read = sum(8 * n * k + 32 * n for n, k in linears) + 32 * norms
    read += ROWS * (8 * 64 + 32) + (97 - ROWS) * (4 * 64 + 2 * 16)
    residual = (97 - ROWS) * (4 * 64 + 2 * 16)
    spec = model(attention(8), feed_forward=MLP)
    bits = recipe_of(spec, MIXED).weight_bits
    assert bits.read == pytest.approx(read / everything)
    assert bits.stored == pytest.approx((read + residual) / everything)
    options = ExecutorchOptions(quantization=MIXED)
    assert options.described(recipe_of(spec, options)) == (
        f"linear int8, embedding int8, head int4 but {ROWS} rows, smoothed, gptq; "
        f"{read / everything:.2f} bits a weight read for a token, {(read + residual) / everything:.2f} stored"
    )
    assert ExecutorchOptions().described(recipe_of(spec, ExecutorchOptions())) == "float32"
