"""Families against Transformers' own reading of the same configs."""

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from exporter import families
from exporter.errors import CheckpointError, UnsupportedModelError
from exporter.families import ARCHITECTURES, MODEL_TYPES, discover, from_gguf, from_hf
from exporter.model.rope import inverse_frequencies
from exporter.spec import AttentionSpec, MLPSpec, ModelSpec

CLASSES: dict[str, Any] = {
    "gemma3_text": Gemma3TextConfig,
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
SMALL = {
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 97,
}
GEMMA = {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 8, **SMALL}
LLAMA = {"model_type": "llama", **SMALL}
QWEN2 = {"model_type": "qwen2", **SMALL}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def spec_of(config: dict[str, Any]) -> ModelSpec:
    return from_hf(config)[1]


def mixers(spec: ModelSpec) -> list[AttentionSpec]:
    return [layer.mixer for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)]


def windows(config: dict[str, Any]) -> list[int | None]:
    return [mixer.window for mixer in mixers(spec_of(config))]


def transformers_frequencies(theirs: Any, layer_type: str | None) -> tuple[torch.Tensor, float]:
    """What Transformers' rotary embedding computes for one kind of layer; the default type is the textbook formula."""
    parameters = theirs.rope_parameters[layer_type] if layer_type else theirs.rope_parameters
    if parameters["rope_type"] == "default":
        dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
        return 1.0 / (parameters["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)), 1.0
    result: tuple[torch.Tensor, float] = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](
        theirs, torch.device("cpu"), layer_type=layer_type
    )
    return result


def assert_like_transformers(config: dict[str, Any]) -> ModelSpec:
    """Every field of the spec against the config object Transformers makes of the same dictionary."""
    spec = spec_of(copy.deepcopy(config))
    kwargs = {key: value for key, value in copy.deepcopy(config).items() if key != "model_type"}
    theirs = CLASSES[config["model_type"]](**kwargs)
    for name in ("vocab_size", "hidden_size", "max_position_embeddings", "tie_word_embeddings"):
        assert getattr(spec, name) == getattr(theirs, name), name
    assert spec.norm_eps == theirs.rms_norm_eps
    assert spec.final_logit_softcap == getattr(theirs, "final_logit_softcapping", None)
    assert len(spec.layers) == theirs.num_hidden_layers
    gemma = config["model_type"] == "gemma3_text"
    types = getattr(theirs, "layer_types", None)
    for i, mixer in enumerate(mixers(spec)):
        assert mixer.num_attention_heads == theirs.num_attention_heads
        assert mixer.num_key_value_heads == theirs.num_key_value_heads
        head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
        assert mixer.head_dim == head_dim
        assert mixer.scale == pytest.approx((theirs.query_pre_attn_scalar if gemma else head_dim) ** -0.5)
        assert mixer.logit_softcap == getattr(theirs, "attn_logit_softcapping", None)
        slides = config["model_type"] == "mistral" or (types is not None and types[i] == "sliding_attention")
        assert mixer.window == (theirs.sliding_window if slides else None), i
        assert mixer.rope is not None
        frequencies, factor = transformers_frequencies(theirs, types[i] if gemma and types else None)
        ours, our_factor = inverse_frequencies(mixer.rope)
        torch.testing.assert_close(ours, frequencies, rtol=1e-6, atol=0)
        assert our_factor == pytest.approx(factor)
    return spec


@pytest.mark.parametrize("name", CLASSES)
def test_defaults_are_those_of_transformers(name: str) -> None:
    defaults = importlib.import_module(f"exporter.families.{name.removesuffix('_text')}").DEFAULTS
    theirs = CLASSES[name](use_sliding_window=True) if name.startswith("qwen") else CLASSES[name]()
    for key, value in defaults.items():
        if key == "use_sliding_window":
            assert getattr(CLASSES[name](), key) == value
        elif value is not None:
            assert getattr(theirs, key) == value, key
    assert_like_transformers({"model_type": name})


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"sliding_window_pattern": 3},
        {"layer_types": ["full_attention", "sliding_attention"] * 4},
        {"rope_theta": 500000.0, "rope_local_base_freq": 20000.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
            }
        },
        {"query_pre_attn_scalar": 168, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        {"tie_word_embeddings": False},
        {"final_logit_softcapping": None, "attn_logit_softcapping": None},
    ],
)  # fmt: skip
def test_gemma3_spellings(change: dict[str, Any]) -> None:
    spec = assert_like_transformers(GEMMA | change)
    assert spec.embedding_scale == 8.0
    assert all(layer.post_norms for layer in spec.layers)
    assert all(mixer.qk_norm for mixer in mixers(spec))
    assert spec.layers[0].feed_forward == MLPSpec(intermediate_size=96, activation="gelu_tanh")


def test_three_spellings_of_one_gemma_pattern_agree() -> None:
    listed = ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["sliding_attention"] * 2
    expected = [8, 8, None, 8, 8, None, 8, 8]
    assert windows(GEMMA | {"sliding_window_pattern": 3}) == expected
    assert windows(GEMMA | {"_sliding_window_pattern": 3}) == expected
    assert windows(GEMMA | {"layer_types": listed}) == expected
    assert windows(GEMMA) == [8, 8, 8, 8, 8, None, 8, 8]


def test_rope_scaling_speaks_of_gemmas_global_layers() -> None:
    nested = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    }
    old = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    assert spec_of(GEMMA | nested) == spec_of(GEMMA | old)


def test_local_layers_rotate_with_base_10000_unscaled() -> None:
    spec = spec_of(GEMMA | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 1e6})
    local, glob = mixers(spec)[0].rope, mixers(spec)[5].rope
    assert local is not None and (local.theta, local.scaling, local.factor) == (10000.0, "none", 1.0)
    assert glob is not None and (glob.theta, glob.scaling, glob.factor) == (1e6, "linear", 8.0)


def test_a_null_window_gives_full_layers() -> None:
    assert windows(GEMMA | {"sliding_window": None}) == [None] * 8
    assert windows(LLAMA | {"model_type": "mistral", "sliding_window": None}) == [None] * 8


def test_multimodal_gemma_is_read_through_text_config() -> None:
    text = {key: value for key, value in GEMMA.items() if key != "vocab_size"} | {"rope_scaling": None}
    outer = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 3}}
    assert spec_of(outer) == spec_of(GEMMA | {"vocab_size": 262208})
    assert not spec_of(outer | {"tie_word_embeddings": False}).tie_word_embeddings


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        LLAMA | {"num_key_value_heads": None},
        LLAMA | {"head_dim": 32},
        LLAMA | {"head_dim": None},
        LLAMA | {"rope_theta": 500000.0, "rope_scaling": LLAMA3, "max_position_embeddings": 131072},
        LLAMA | {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}},
        LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}},
        LLAMA | {"rope_scaling": {"type": "yarn", "factor": 128.0, "original_max_position_embeddings": 512}},
        LLAMA
        | {
            "rope_scaling": {
                "rope_type": "yarn", "factor": 128.0, "original_max_position_embeddings": 512,
                "attention_factor": 1.0, "beta_fast": 16.0, "beta_slow": 2.0,
            }
        },
        LLAMA
        | {
            "rope_scaling": {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "mscale": 1.0,
                "mscale_all_dim": 0.5,
            }
        },
        LLAMA | {"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
        LLAMA | {"model_type": "mistral", "sliding_window": 8, "head_dim": 24},
        QWEN2,
        QWEN2 | {"use_sliding_window": False, "sliding_window": 8},
        QWEN2 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
        QWEN2
        | {
            "use_sliding_window": True, "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 4,
        },
        QWEN2 | {"model_type": "qwen3", "attention_bias": True},
    ],
)  # fmt: skip
def test_llama_like_spellings(config: dict[str, Any]) -> None:
    assert_like_transformers(config)


def test_use_sliding_window_starts_at_max_window_layers() -> None:
    on = QWEN2 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
    assert windows(on) == [None] * 3 + [8] * 5
    assert windows(on | {"use_sliding_window": False}) == [None] * 8


def test_yarn_attention_factor_is_the_formulas_or_the_authors() -> None:
    scaling = {"rope_type": "yarn", "factor": 128.0, "original_max_position_embeddings": 512}
    rope = mixers(spec_of(LLAMA | {"rope_scaling": scaling}))[0].rope
    assert rope is not None and inverse_frequencies(rope)[1] == pytest.approx(1.4852, abs=1e-4)
    rope = mixers(spec_of(LLAMA | {"rope_scaling": scaling | {"attention_factor": 1.0}}))[0].rope
    assert rope is not None and inverse_frequencies(rope)[1] == 1.0


def test_yarn_without_a_factor_stretches_to_the_models_length() -> None:
    scaling = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 512}
    rope = mixers(spec_of(LLAMA | {"rope_scaling": scaling, "max_position_embeddings": 2048}))[0].rope
    assert rope is not None and rope.factor == 4.0


def test_biases_and_norms_of_the_variants() -> None:
    def flags(config: dict[str, Any]) -> tuple[bool, bool, bool, bool]:
        layer = spec_of(config).layers[0]
        assert isinstance(layer.mixer, AttentionSpec) and isinstance(layer.feed_forward, MLPSpec)
        return layer.mixer.qkv_bias, layer.mixer.output_bias, layer.mixer.qk_norm, layer.feed_forward.bias

    assert flags(LLAMA) == (False, False, False, False)
    assert flags(LLAMA | {"attention_bias": True, "mlp_bias": True}) == (True, True, False, True)
    assert flags(LLAMA | {"model_type": "mistral"}) == (False, False, False, False)
    assert flags(QWEN2) == (True, False, False, False)
    assert flags(QWEN2 | {"model_type": "qwen3"}) == (False, False, True, False)
    assert flags(QWEN2 | {"model_type": "qwen3", "attention_bias": True}) == (True, True, True, False)


def test_tie_defaults() -> None:
    assert spec_of(GEMMA).tie_word_embeddings
    assert not spec_of(LLAMA).tie_word_embeddings


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mamba"}, ["'mamba'", "gemma3_text", "qwen3"]),
        ({}, ["model_type None"]),
        (LLAMA | {"hidden_act": "relu2"}, ["relu2", "gelu_pytorch_tanh"]),
        (LLAMA | {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, ["longrope"]),
        (LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mrope_section": [1]}}, ["mrope_section"]),
        (LLAMA | {"sliding_window": 8}, ["never slide"]),
        (LLAMA | {"model_type": "mistral", "layer_types": ["full_attention"] * 8}, ["layer_types"]),
        (GEMMA | {"layer_types": ["chunked_attention"] * 8}, ["chunked_attention"]),
        (GEMMA | {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        (LLAMA | {"quantization_config": {"quant_method": "gptq"}}, ["quantised already (GPTQ)"]),
    ],
)
def test_what_the_spec_cannot_say_is_refused(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        from_hf(config)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (GEMMA | {"layer_types": ["full_attention"] * 7}, "length 7"),
        (GEMMA | {"sliding_window": 0}, "sliding_window = 0"),
        (GEMMA | {"sliding_window_pattern": 0}, "sliding_window_pattern = 0"),
        (LLAMA | {"hidden_size": "64"}, "hidden_size = '64'"),
        (LLAMA | {"num_key_value_heads": 3}, "no multiple"),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        (LLAMA | {"rope_scaling": {"rope_type": "linear"}}, "factor"),
        (LLAMA | {"rope_scaling": "linear"}, "rope_scaling = 'linear'"),
        (LLAMA | {"rope_theta": "10000"}, "rope_theta = '10000'"),
        (LLAMA | {"rms_norm_eps": None}, "rms_norm_eps = None"),
        (GEMMA | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0"),
        (GEMMA | {"layer_types": 6}, "layer_types of type int"),
        (GEMMA | {"final_logit_softcapping": -1.0}, "final_logit_softcapping = -1.0"),
        (QWEN2 | {"max_window_layers": None}, "max_window_layers = None"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(config: dict[str, Any], word: str) -> None:
    with pytest.raises(CheckpointError, match=word):
        from_hf(config)


def test_every_module_but_what_families_share_is_a_family() -> None:
    """And is found under all its names, which are told in alphabetical order."""
    shared = {"__init__", "base", "gguf", "llama_like", "quantised", "reading", "tensors"}
    modules = {path.stem for path in Path(families.__file__).parent.glob("*.py")} - shared
    found = [importlib.import_module(f"exporter.families.{name}").FAMILY for name in modules]
    assert {name: family for family in found for name in family.model_types} == MODEL_TYPES
    assert {name: family for family in found for name in family.architectures} == ARCHITECTURES
    assert MODEL_TYPES["gemma3"] is MODEL_TYPES["gemma3_text"] is ARCHITECTURES["gemma3"]
    assert {"llama", "mistral", "qwen2", "qwen3"} <= set(MODEL_TYPES) and {"llama", "qwen3"} <= set(ARCHITECTURES)
    with pytest.raises(UnsupportedModelError, match=f"one of {', '.join(sorted(MODEL_TYPES))}"):
        from_hf({"model_type": "mamba"})
    with pytest.raises(UnsupportedModelError, match=f"one of {', '.join(sorted(ARCHITECTURES))}"):
        from_gguf({"general.architecture": "mamba"}, {}, pytest.fail)


@pytest.mark.parametrize("claims", [{"model_types": ("a",)}, {"architectures": ("g",)}, {}], ids=str)
def test_no_two_families_claim_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claims: dict[str, Any]
) -> None:
    """A package of two families and a module that is none; the first claims what the second does, or does not."""
    text = (
        "from exporter.families.base import Family\n"
        "FAMILY = Family(model_types={model_types}, from_hf=None, architectures={architectures}, from_gguf=print)\n"
    )
    package = tmp_path / f"families_that_claim_{'_'.join(claims) or 'nothing_twice'}"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "shared.py").touch()
    (package / "zebra.py").write_text(text.format(model_types=("a",), architectures=("g",)))
    own = {"model_types": ("z", "b"), "architectures": ("h",)} | claims
    (package / "ant.py").write_text(text.format(**own))
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module(package.name)
    if claims:
        with pytest.raises(AssertionError, match="is claimed by zebra and by another family"):
            discover(module)
        return
    model_types, architectures = discover(module)
    assert (list(model_types), list(architectures)) == (["a", "b", "z"], ["g", "h"])
    assert model_types["b"] is model_types["z"] is architectures["h"]
