"""Presets and mixed tables on tiny models: which bytes embedding and head share, and what each says."""

from __future__ import annotations

from typing import Any

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
from exporter.quantization import ExactHead, QuantizedEmbedding, QuantizedLinear
from exporter.quantization.modules import pack_nibbles
from exporter.quantization.tables import table_of
from exporter.spec import PRESETS, GridSpec, MLPSpec, ModelSpec, QuantizationSpec

IDS = torch.tensor([token_ids(150, seed=5)])
TIED = model(attention(8), attention(None))
EXACT = QuantizationSpec(
    linear="int8", embedding="int8_grouped", head="int4", smooth=True, rounding="gptq", head_exact_rows=3
)


def quantized(model_spec: ModelSpec, spec: QuantizationSpec) -> Decoder:
    decoder = decoder_of(model_spec)
    quantize_by(spec, decoder, IDS)
    return decoder


def logits_of(decoder: Decoder) -> torch.Tensor:
    return play(decoder, token_ids(20), [20], states_of(decoder))[19]


def test_one_table_of_eight_bits_is_the_embedding_and_has_the_exact_rows() -> None:
    decoder = quantized(TIED, EXACT)
    head = decoder.lm_head
    assert isinstance(head, ExactHead) and head.table is decoder.embed_tokens and head.count == 3
    assert head.rough.weight.shape == (97, 64) and head.rough.scales.shape == (97, 2)
    assert head.table.weight.dtype == torch.int8 and head.table.scales.dtype == torch.float16
    original = decoder_of(TIED).embed_tokens.weight.detach()
    rows = decoder.embed_tokens(torch.arange(97)[None])[0]
    steps = original.view(97, 2, 32).abs().amax(-1, keepdim=True) / 127
    assert ((rows - original).view(97, 2, 32).abs() <= steps * 0.51).all(), "the model's own rows, before smoothing"
    assert decoder.embed_tokens(torch.tensor([[3, 96, 40, 3]]))[0].equal(rows[[3, 96, 40, 3]])


def test_rows_that_were_q8_0_come_back_as_they_were() -> None:
    generator = torch.Generator().manual_seed(3)
    scales = (torch.rand(97, 2, 1, generator=generator) * 0.01).half().float()
    codes = torch.randint(-127, 128, (97, 2, 32), generator=generator).float()
    codes[..., 5] = 127.0  # a block's largest
    weight = (codes * scales).view(97, 64)
    part = GridSpec(grid="int8_grouped", codes="int8", group_size=32, scales="float16")
    assert torch.equal(table_of(weight, part)(torch.arange(97)[None])[0], weight)


def test_an_exact_head_by_its_definition() -> None:
    """The best tokens of the rough head get the products of the float input with the rows of the embedding."""
    decoder = quantized(TIED, EXACT)
    head = decoder.lm_head
    rows = decoder.embed_tokens(torch.arange(97)[None])[0].double()
    x = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0))
    rough, got = head.rough(x)[0], head(x)[0]
    whole = x[0].double() * head.factors
    for position in range(5):
        best = sorted(range(97), key=lambda token: -float(rough[position, token]))[:3]
        for token in range(97):
            want = float(rows[token] @ whole[position]) if token in best else float(rough[position, token])
            assert float(got[position, token]) == pytest.approx(want, rel=1e-5, abs=1e-5)
        alone = head(x[:, position : position + 1])
        assert alone.shape == (1, 1, 97) and (alone[0, 0] - got[position]).abs().max() < 1e-5


@pytest.mark.parametrize("tied", [True, False])
def test_an_exact_head_is_nearer_to_the_float_model_than_its_four_bits(tied: bool) -> None:
    spec = model(attention(8), attention(None), tie_word_embeddings=tied)
    want = torch.log_softmax(logits_of(decoder_of(spec)), -1)

    def divergence(rules: QuantizationSpec) -> float:
        got = torch.log_softmax(logits_of(quantized(spec, rules)), -1)
        return float((want.exp() * (want - got)).sum())

    floats = {"linear": "none", "smooth": False}
    exact = divergence(EXACT.model_copy(update=floats))
    assert exact < divergence(EXACT.model_copy(update=floats | {"head_exact_rows": 0}))
    assert exact < 0.02


def test_nibbles_are_packed_as_xnnpack_packs_them() -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(3, 2)
    assert torch.equal(pack_nibbles(codes), NodeVisitor.convert_to_qc4w(codes))


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
        ({"linear": "int8", "head_exact_rows": 8}, "quantised head for head_exact_rows"),
        ({"head": "int4", "head_exact_rows": -1}, "greater than or equal to 0"),
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
        QuantizationSpec(), EXACT, PRESETS["accurate"], PRESETS["small"], QuantizationSpec(head="int8"),
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


def test_bits_a_weight() -> None:
    """By hand: one layer of 64 channels, 4 heads of 16, 2 KV heads, 96 inner channels, 97 rows of vocabulary."""
    linears = [(64, 64), (32, 64), (32, 64), (64, 64), (96, 64), (96, 64), (64, 96)]
    matrices, table, norms = sum(n * k for n, k in linears), 97 * 64, 3 * 64
    everything = matrices + table + norms
    read = sum(8 * n * k + 32 * n for n, k in linears) + 32 * norms
    read += 97 * (4 * 64 + 2 * 16) + 3 * (8 * 64 + 2 * 16)
    beside = (97 - 3) * (8 * 64 + 2 * 16)
    spec = model(attention(8), feed_forward=MLP)
    bits = recipe_of(spec, EXACT).weight_bits
    assert bits.read == pytest.approx(read / everything)
    assert bits.stored == pytest.approx((read + beside) / everything)
    options = ExecutorchOptions(quantization=EXACT)
    assert options.described(recipe_of(spec, options)) == (
        "linear int8, embedding int8_grouped, head int4 with 3 exact rows, smoothed, gptq; "
        f"{read / everything:.2f} bits a weight read for a token, {(read + beside) / everything:.2f} stored"
    )
    assert ExecutorchOptions().described(recipe_of(spec, ExecutorchOptions())) == "float32"
