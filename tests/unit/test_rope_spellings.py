"""Every way a config.json may spell its rotation, beside Transformers' own reading of it: the same frequencies, or
refused because something that is written there would not count."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from exporter.errors import UserError
from exporter.families import from_hf
from exporter.model.rope import inverse_frequencies
from exporter.spec import AttentionSpec

ROTARY: dict[str, Callable[[Any], Any]] = {
    "llama": LlamaRotaryEmbedding, "mistral": MistralRotaryEmbedding, "qwen2": Qwen2RotaryEmbedding,
    "qwen3": Qwen3RotaryEmbedding, "gemma3_text": Gemma3RotaryEmbedding,
}  # fmt: skip
KINDS = ("full_attention", "sliding_attention")
BASE = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 97, "num_hidden_layers": 6, "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 16, "sliding_window": 8,
    "use_sliding_window": False,
}  # fmt: skip
Config = dict[str, Any]


def base(model_type: str) -> Config:
    own = {key: value for key, value in BASE.items() if model_type != "llama" or key != "sliding_window"}
    return {"model_type": model_type} | own


@st.composite
def parameters(draw: st.DrawFn) -> Config:
    """One section, or one kind of layer in it."""
    kind = draw(st.sampled_from([None, "default", "linear", "yarn", "llama3"]))
    found: Config = {}
    for key in draw(st.sampled_from([(), ("type",), ("rope_type",), ("rope_type",), ("type", "rope_type")])):
        if kind is not None:
            found[key] = kind
    if {"type", "rope_type"} <= found.keys() and draw(st.integers(0, 3)) == 0:
        found["type"] = "linear"
    if kind in ("linear", "yarn", "llama3"):
        found["factor"] = draw(st.sampled_from([2.0, 4.0, 4]))
    if kind in ("yarn", "llama3") and draw(st.booleans()):
        found["original_max_position_embeddings"] = draw(st.sampled_from([32, 64]))
    if kind == "llama3":
        found |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    optional = {"rope_theta": 5e5} | (
        {"truncate": False, "beta_fast": 16.0, "attention_factor": 1.2} if kind == "yarn" else {}
    )
    optional |= {"partial_rotary_factor": 0.5} if draw(st.integers(0, 9)) == 0 else {}
    return found | {key: value for key, value in optional.items() if draw(st.integers(0, 2)) == 0}


@st.composite
def sections(draw: st.DrawFn, model_type: str) -> Config:
    """What a config says of its rotation."""
    config: Config = {"max_position_embeddings": draw(st.sampled_from([128, 2048]))}
    beside = {"rope_theta": 1e6, "original_max_position_embeddings": 64, "partial_rotary_factor": 0.5}
    beside |= {"rope_local_base_freq": 2e4} if model_type == "gemma3_text" else {}
    rare = {"rope_theta": 1, "rope_local_base_freq": 1}
    config |= {key: value for key, value in beside.items() if draw(st.integers(0, rare.get(key, 12))) == 0}
    nested = st.fixed_dictionaries({}, optional=dict.fromkeys(KINDS, parameters()))
    usual, other = (nested, parameters()) if model_type == "gemma3_text" else (parameters(), nested)
    rope_parameters = draw(st.one_of(st.none(), st.none(), usual, usual, other))
    rope_scaling = draw(st.one_of(st.none(), parameters(), parameters(), nested))
    for key, value in (("rope_parameters", rope_parameters), ("rope_scaling", rope_scaling)):
        if value is not None or draw(st.booleans()):
            config[key] = value
    return config


def theirs(config: Config) -> tuple[dict[str, tuple[torch.Tensor, float]], dict[str, Config]]:
    """Frequencies and factor of each kind of layer by Transformers' own code, and the parameters it took.

    Raises:
        KeyError, AttributeError, TypeError: it fails on such a config.
    """
    said = copy.deepcopy(config)
    made = CONFIG_MAPPING[said["model_type"]](**{key: value for key, value in said.items() if key != "model_type"})
    rotary = ROTARY[config["model_type"]](made)
    if config["model_type"] == "gemma3_text":
        found = {
            kind: (getattr(rotary, f"{kind}_inv_freq"), getattr(rotary, f"{kind}_attention_scaling")) for kind in KINDS
        }
        return found, {kind: made.rope_parameters[kind] for kind in KINDS}
    return dict.fromkeys(KINDS, (rotary.inv_freq, rotary.attention_scaling)), dict.fromkeys(KINDS, made.rope_parameters)


def written(config: Config) -> list[tuple[str, str, Any]]:
    """Kind of layer, key and value of everything the config says; a flat section speaks of the global layers."""
    found = []
    for name in ("rope_parameters", "rope_scaling"):
        section = config.get(name) or {}
        nested = any(kind in section for kind in KINDS)
        for kind, own in section.items() if nested else [("full_attention", section)]:
            found += [(kind, key, value) for key, value in (own or {}).items()]
    found += [
        ("full_attention", key, config[key])
        for key in ("original_max_position_embeddings", "partial_rotary_factor")
        if key in config
    ]
    return found


def all_counts(config: Config, taken: dict[str, Config]) -> bool:
    """Whether Transformers takes all that the config says; that a type is the default one is no word against another,
    and a factor without a type is none."""

    def counts(took: Config, key: str, value: Any) -> bool:
        named = "rope_type" if key == "type" else key
        return value == "default" or (took.get(named) == value and (key != "factor" or took["rope_type"] != "default"))

    return all(counts(taken[kind], key, value) for kind, key, value in written(config))


def counts_and_is_refused(config: Config) -> bool:
    """What Transformers takes or ignores without harm, and is refused all the same."""
    sections_ = [config.get(name) or {} for name in ("rope_parameters", "rope_scaling")]
    by_kind = [any(kind in section for kind in KINDS) for section in sections_]
    one_rotation = config["model_type"] != "gemma3_text"
    parts = any(key == "partial_rotary_factor" for _, key, _ in written(config))
    return (any(by_kind) if one_rotation else by_kind[1]) or parts


@pytest.mark.parametrize("model_type", ROTARY)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_spelling_is_read_as_transformers_reads_it_or_refused(model_type: str, data: st.DataObject) -> None:
    config = base(model_type) | data.draw(sections(model_type))
    try:
        layers = [layer.mixer for layer in from_hf(copy.deepcopy(config)).spec.layers]
    except UserError:
        layers = []
    try:
        frequencies, taken = theirs(config)
    except (KeyError, AttributeError, TypeError):
        return
    if not layers:
        assert not all_counts(config, taken) or counts_and_is_refused(config)
        return
    for mixer in layers:
        assert isinstance(mixer, AttentionSpec) and mixer.rope is not None
        ours, factor = inverse_frequencies(mixer.rope)
        want, want_factor = frequencies["full_attention" if mixer.window is None else "sliding_attention"]
        assert torch.equal(ours, want) and factor == pytest.approx(want_factor, rel=1e-12)


YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
V5 = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
GEMMA_V5 = {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6},
                                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}  # fmt: skip


@pytest.mark.parametrize("model_type", [name for name in ROTARY if name != "gemma3_text"])
@pytest.mark.parametrize("name", ["type", "rope_type"])
def test_yarn_added_by_hand_to_a_config_of_transformers_5_counts(model_type: str, name: str) -> None:
    """A model card's recipe; `rope_parameters` says "default" there."""
    spec = from_hf(base(model_type) | V5 | {"max_position_embeddings": 128, "rope_scaling": YARN | {name: "yarn"}}).spec
    ropes = [layer.mixer.rope for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)]
    assert {(rope.scaling, rope.factor, rope.original_max_position_embeddings) for rope in ropes if rope} == {
        ("yarn", 4.0, 32)
    }


def test_scaling_added_by_hand_to_gemma_counts_for_the_global_layers() -> None:
    spec = from_hf(base("gemma3_text") | GEMMA_V5 | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}).spec
    mixers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)]
    assert [mixer.rope.factor for mixer in mixers if mixer.rope] == [1.0] * 5 + [8.0]


REFUSED: list[tuple[str, Config, str]] = [
    ("llama", {"rope_scaling": YARN | {"type": "yarn", "rope_type": "default"}}, "type 'yarn' and rope_type 'default'"),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": YARN | {"type": "yarn"}},
     "rope_theta 500000.0 in rope_parameters and 10000.0 by rope_scaling"),
    ("qwen2", {"rope_parameters": YARN | {"rope_type": "yarn"}, "rope_scaling": {"type": "linear", "factor": 2.0}},
     "factor 4.0 in rope_parameters and 2.0 by rope_scaling"),
    ("qwen2", {"rope_parameters": YARN | {"rope_type": "yarn"}, "rope_scaling": {"rope_theta": 1e4}},
     "factor 4.0 in rope_parameters and None by rope_scaling"),
    ("llama", {"rope_scaling": {"factor": 4.0}}, "a RoPE factor 4.0 without a rope_type"),
    ("mistral", GEMMA_V5, "rope_parameters with full_attention and sliding_attention"),
    ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ("llama", {"rope_scaling": YARN | {"type": "yarn"}, "original_max_position_embeddings": 64}, "beside it, 64"),
    ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 8.0}}, '"type": "linear" in rope_scaling'),
    ("gemma3_text", {"rope_parameters": {"rope_type": "linear", "factor": 8.0}}, "in rope_parameters, for no"),
    ("gemma3_text", {"rope_scaling": GEMMA_V5["rope_parameters"]}, "rope_scaling for each kind of layer"),
    ("gemma3_text", {"rope_scaling": YARN | {"rope_type": "yarn", "truncate": False}}, "truncate = false"),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "config", "words"), REFUSED)
def test_what_would_not_count_is_refused_by_name(model_type: str, config: Config, words: str) -> None:
    with pytest.raises(UserError) as caught:
        from_hf(base(model_type) | config)
    assert words in str(caught.value)
