"""GGUF metadata against the config.json of the same model, which is held to Transformers elsewhere."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from test_families import GEMMA, LLAMA, LLAMA3, mixers, spec_of
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from exporter.errors import CheckpointError, UnsupportedModelError
from exporter.families import from_gguf
from exporter.families.gguf import short_decimal
from exporter.model.rope import inverse_frequencies
from exporter.spec import MLPSpec, ModelSpec

GGUF_GEMMA: dict[str, Any] = {
    "general.architecture": "gemma3",
    "gemma3.block_count": 8,
    "gemma3.embedding_length": 64,
    "gemma3.feed_forward_length": 96,
    "gemma3.context_length": 256,
    "gemma3.attention.head_count": 4,
    "gemma3.attention.head_count_kv": 2,
    "gemma3.attention.key_length": 16,
    "gemma3.attention.value_length": 16,
    "gemma3.attention.sliding_window": 8,
    "gemma3.attention.layer_norm_rms_epsilon": 9.999999974752427e-07,
    "gemma3.rope.freq_base": 1000000.0,
}
GGUF_LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.context_length": 256,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "llama.rope.freq_base": 500000.0,
    "llama.rope.dimension_count": 16,
}
SHAPES = {"token_embd.weight": (97, 64)}


def gguf_spec(metadata: dict[str, Any], shapes: Mapping[str, tuple[int, ...]] | None = None, **read: Any) -> ModelSpec:
    return from_gguf(metadata, shapes or SHAPES, lambda name: read["tensors"][name])[1]


def test_gguf_metadata_means_the_same_as_the_config() -> None:
    gemma = GEMMA | {"query_pre_attn_scalar": 16, "max_position_embeddings": 256}
    assert gguf_spec(GGUF_GEMMA) == spec_of(gemma)
    scaled = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    linear = spec_of(gemma | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert gguf_spec(GGUF_GEMMA | scaled) == linear
    assert gguf_spec(GGUF_GEMMA | {"gemma3.rope.scaling.factor": 8.0}) == linear  # as llama.cpp reads it
    assert gguf_spec(GGUF_GEMMA | scaled | {"gemma3.rope.scaling.type": "none"}) == spec_of(gemma)
    for pattern in (3, [True, True, False, True, True, False, True, True]):
        metadata = GGUF_GEMMA | {"gemma3.attention.sliding_window_pattern": pattern}
        assert gguf_spec(metadata) == spec_of(gemma | {"sliding_window_pattern": 3})
    caps = {"gemma3.final_logit_softcapping": 30.0, "gemma3.attn_logit_softcapping": 50.0}
    assert gguf_spec(GGUF_GEMMA | caps) == spec_of(
        gemma | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}
    )
    llama = {"num_hidden_layers": 2, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 256}
    assert gguf_spec(GGUF_LLAMA) == spec_of(LLAMA | llama | {"tie_word_embeddings": True})
    with_head = {**SHAPES, "output.weight": (97, 64)}
    assert gguf_spec(GGUF_LLAMA, with_head) == spec_of(LLAMA | llama | {"tie_word_embeddings": False})


def test_the_27b_gemma_scales_by_its_width() -> None:
    depth = {"gemma3.block_count": 62, "gemma3.embedding_length": 5376}
    heads = {"gemma3.attention.head_count": 32, "gemma3.attention.head_count_kv": 16}
    spec = gguf_spec(GGUF_GEMMA | depth | heads)
    assert mixers(spec)[0].scale == pytest.approx(168**-0.5)


def test_llama3_scaling_is_recovered_from_rope_freqs() -> None:
    theirs = LlamaConfig(head_dim=64, rope_parameters=LLAMA3 | {"rope_theta": 500000.0})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, torch.device("cpu"))
    plain = 1.0 / 500000.0 ** (torch.arange(0, 64, 2).float() / 64)
    metadata = GGUF_LLAMA | {"llama.rope.dimension_count": 64, "llama.attention.key_length": 64}
    shapes = {**SHAPES, "rope_freqs.weight": (32,)}
    spec = gguf_spec(metadata, shapes, tensors={"rope_freqs.weight": plain / scaled})
    rope = mixers(spec)[0].rope
    assert rope is not None and rope.factor == pytest.approx(32.0, rel=1e-5)
    torch.testing.assert_close(inverse_frequencies(rope)[0], scaled, rtol=1e-4, atol=0)
    with pytest.raises(UnsupportedModelError, match="rope_freqs"):
        gguf_spec(metadata, shapes, tensors={"rope_freqs.weight": torch.linspace(1, 32, 32)})


@pytest.mark.parametrize(
    ("metadata", "word"),
    [
        ({"general.architecture": "mamba"}, "mamba"),
        (GGUF_LLAMA | {"llama.expert_count": 8}, "expert_count"),
        (
            GGUF_LLAMA | {"llama.embedding_length": [64, 32]},
            r"llama\.embedding_length that differs from layer to layer",
        ),
        (GGUF_LLAMA | {"llama.attention.key_length": [16, 8]}, r"llama\.attention\.key_length that differs"),
        (GGUF_LLAMA | {"llama.rope.freq_base": [1e4, 1e6]}, r"llama\.rope\.freq_base that differs"),
        (
            GGUF_GEMMA | {"gemma3.attention.sliding_window": [8] * 7 + [4]},
            r"gemma3\.attention\.sliding_window that differs",
        ),
        (GGUF_LLAMA | {"llama.rope.scaling.type": "yarn"}, "yarn"),
    ],
)
def test_gguf_arithmetic_that_is_unknown_is_refused(metadata: dict[str, Any], word: str) -> None:
    with pytest.raises(UnsupportedModelError, match=word):
        gguf_spec(metadata)


def test_equal_values_a_layer_count_as_one() -> None:
    for key, value in (("attention.head_count_kv", 2), ("embedding_length", 64), ("rope.freq_base", 500000.0)):
        assert gguf_spec(GGUF_LLAMA | {f"llama.{key}": [value, value]}) == gguf_spec(GGUF_LLAMA)


def test_layers_have_their_own_numbers() -> None:
    """Heads, KV heads and MLP of each layer from arrays; what is one number for all stays so."""
    arrays = {"attention.head_count": [4, 8], "attention.head_count_kv": [4, 2], "feed_forward_length": [96, 32]}
    spec = gguf_spec(GGUF_LLAMA | {"llama.attention.key_length": 16} | {f"llama.{k}": v for k, v in arrays.items()})
    first, second = mixers(spec)
    assert (first.num_attention_heads, first.num_key_value_heads, first.head_dim) == (4, 4, 16)
    assert (second.num_attention_heads, second.num_key_value_heads, second.head_dim) == (8, 2, 16)
    assert [
        layer.feed_forward.intermediate_size for layer in spec.layers if isinstance(layer.feed_forward, MLPSpec)
    ] == [
        96,
        32,
    ]
    silent = GGUF_LLAMA | {"llama.attention.head_count": [4, 8], "llama.attention.head_count_kv": 4}
    assert [mixer.head_dim for mixer in mixers(gguf_spec(silent))] == [16, 16]  # 64 / 4, the first layer's
    gemma = GGUF_GEMMA | {
        "gemma3.attention.sliding_window_pattern": [False, True] * 4,
        "gemma3.attention.head_count_kv": [1, 2, 2, 2, 4, 1, 1, 1],
        "gemma3.feed_forward_length": [96] * 7 + [32],
    }
    layers = gguf_spec(gemma).layers
    assert [mixer.window for mixer in mixers(gguf_spec(gemma))] == [None, 8] * 4
    assert [mixer.num_key_value_heads for mixer in mixers(gguf_spec(gemma))] == [1, 2, 2, 2, 4, 1, 1, 1]
    assert [layer.feed_forward.intermediate_size for layer in layers if isinstance(layer.feed_forward, MLPSpec)] == (
        [96] * 7 + [32]
    )


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("attention.head_count_kv", [2, 2, 2], ["llama.attention.head_count_kv with 3 values", "each of 2 layers"]),
        ("attention.head_count_kv", [2, 0], ["llama.attention.head_count_kv = 0", "positive"]),
        ("feed_forward_length", [96, True], ["llama.feed_forward_length = True"]),
        ("attention.head_count", [4, 3], ["num_attention_heads 3 is no multiple"]),
    ],
)
def test_arrays_that_contradict_themselves_are_refused(key: str, value: Any, words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        gguf_spec(GGUF_LLAMA | {f"llama.{key}": value})
    for word in words:
        assert word in str(caught.value)


def test_a_pattern_that_does_not_name_every_layer_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"sliding_window_pattern with 7 values.*each of 8 layers"):
        gguf_spec(GGUF_GEMMA | {"gemma3.attention.sliding_window_pattern": [True] * 7})


@pytest.mark.parametrize("value", [1e-06, 1e-05, 1e-12, 0.1, 10000.0, 3.14159])
def test_float32_comes_back_as_it_was_written(value: float) -> None:
    stored = torch.tensor(value, dtype=torch.float32).item()
    assert short_decimal(stored) == value
