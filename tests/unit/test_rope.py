"""Rotary frequencies: to the bit those of Transformers, and close to the published formulas in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from exporter.model.rope import RotaryTable, inverse_frequencies, rotate
from exporter.spec import RopeSpec

LLAMA3 = {
    "scaling": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"scaling": "yarn", "original_max_position_embeddings": 4096}
CASES: dict[str, dict[str, Any]] = {
    "gemma local": {"theta": 10_000.0, "rotary_dim": 256},
    "gemma global": {"theta": 1_000_000.0, "rotary_dim": 256, "scaling": "linear", "factor": 8.0},
    "plain": {"theta": 500_000.0, "rotary_dim": 64},
    "linear": {"theta": 10_000.0, "rotary_dim": 128, "scaling": "linear", "factor": 2.5},
    "llama 3.1": {"theta": 500_000.0, "rotary_dim": 128, "factor": 8.0, **LLAMA3},
    "llama 3.2": {"theta": 500_000.0, "rotary_dim": 64, "factor": 32.0, **LLAMA3},
    "gpt-oss": {"theta": 150_000.0, "rotary_dim": 64, "factor": 32.0, "truncate": False, **YARN},
    "yarn, whole channels": {"theta": 10_000.0, "rotary_dim": 128, "factor": 32.0, **YARN},
    "yarn, 128": {"theta": 10_000.0, "rotary_dim": 128, "factor": 128.0, **YARN},
    "yarn, own betas": {"theta": 1e6, "rotary_dim": 96, "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0, **YARN},
    "yarn, own attention factor": {"theta": 1e6, "rotary_dim": 96, "factor": 4.0, "attention_factor": 1.0, **YARN},
    "yarn, tiny": {"theta": 10_000.0, "rotary_dim": 8, "factor": 32.0, "scaling": "yarn",
                   "original_max_position_embeddings": 16},
}  # fmt: skip


def transformers_config(spec: RopeSpec) -> LlamaConfig:
    parameters = spec.model_dump(exclude={"scaling", "theta", "rotary_dim"}, exclude_none=True)
    parameters |= {"rope_theta": spec.theta, "rope_type": "default" if spec.scaling == "none" else spec.scaling}
    return LlamaConfig(head_dim=spec.rotary_dim, max_position_embeddings=131_072, rope_parameters=parameters)


def formula(spec: RopeSpec) -> list[float]:
    """One frequency after the other, from the papers, in Python floats."""
    frequencies = []
    dim, original = spec.rotary_dim, spec.original_max_position_embeddings or 0
    for i in range(dim // 2):
        plain = spec.theta ** (-2 * i / dim)
        turns = original * plain / (2 * math.pi)  # rotations within the original context
        if spec.scaling == "linear":
            plain /= spec.factor
        elif spec.scaling == "llama3":
            low, high = spec.low_freq_factor, spec.high_freq_factor
            assert low is not None and high is not None
            share = min(max((turns - low) / (high - low), 0.0), 1.0)  # of the unscaled frequency
            plain = (1 - share) * plain / spec.factor + share * plain
        elif spec.scaling == "yarn":

            def channel_of(rotations: float) -> float:
                """Where theta ** (-2c / dim) * original / 2 pi equals `rotations`."""
                return dim / 2 * math.log(original / (2 * math.pi * rotations), spec.theta)

            low, high = channel_of(spec.beta_fast or 32.0), channel_of(spec.beta_slow or 1.0)
            if spec.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, dim - 1)
            share = min(max((i - low) / (high - low or 0.001), 0.0), 1.0)  # of the interpolated frequency
            plain = share * plain / spec.factor + (1 - share) * plain
        frequencies.append(plain)
    return frequencies


@pytest.mark.parametrize("name", CASES)
def test_frequencies_are_those_of_transformers_to_the_bit(name: str) -> None:
    spec = RopeSpec(**CASES[name])
    config = transformers_config(spec)
    ours, factor = inverse_frequencies(spec)
    kind = config.rope_parameters["rope_type"]
    compute = ROPE_INIT_FUNCTIONS.get(kind, LlamaRotaryEmbedding.compute_default_rope_parameters)
    theirs, their_factor = compute(config)
    assert ours.dtype == torch.float32 and torch.equal(ours, theirs)
    assert factor == their_factor


@pytest.mark.parametrize("name", CASES)
def test_frequencies_are_the_formulas(name: str) -> None:
    spec = RopeSpec(**CASES[name])
    ours = inverse_frequencies(spec)[0].double()
    torch.testing.assert_close(ours, torch.tensor(formula(spec), dtype=torch.float64), rtol=1e-6, atol=0)


def test_the_factor_of_llama_3_is_not_fixed() -> None:
    eight, thirty_two = (
        inverse_frequencies(RopeSpec(theta=500_000.0, rotary_dim=64, factor=factor, **LLAMA3))[0]
        for factor in (8.0, 32.0)
    )
    assert eight[0] == thirty_two[0] and float(eight[-1] / thirty_two[-1]) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"factor": 32.0}, 1.3466),
        ({"factor": 128.0}, 1.4852),
        ({"factor": 128.0, "attention_factor": 1.0}, 1.0),
        ({"factor": 128.0, "attention_factor": 0.5}, 0.5),
        ({"factor": 1.0}, 1.0),
        ({"factor": 0.5}, 1.0),
    ],
)
def test_attention_factor_multiplies_cos_and_sin_once(changes: dict[str, float], expected: float) -> None:
    spec = RopeSpec(theta=10_000.0, rotary_dim=64, **YARN, **changes)
    assert inverse_frequencies(spec)[1] == pytest.approx(expected, abs=5e-5)
    cos, sin = RotaryTable(spec)(torch.tensor([0.0, 7.0]))
    torch.testing.assert_close(cos[0, 0, 0], torch.full((32,), expected), rtol=0, atol=5e-5)
    torch.testing.assert_close((cos**2 + sin**2).sqrt(), torch.full((1, 2, 1, 32), expected), rtol=0, atol=5e-5)


@pytest.mark.parametrize("name", CASES)
def test_rotated_queries_equal_those_of_transformers_at_any_position(name: str) -> None:
    spec = RopeSpec(**CASES[name])
    positions = torch.tensor([0, 1, 7, 511, 512, 4095, 32_767, 131_071])
    x = torch.randn(1, len(positions), 3, spec.rotary_dim, generator=torch.Generator().manual_seed(0))
    cos, sin = LlamaRotaryEmbedding(transformers_config(spec))(x, positions[None])
    theirs, _ = apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)
    ours = rotate(x, *RotaryTable(spec)(positions.float()))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rotary_dim", [4, 8, 16])
def test_rotation_is_a_complex_product_and_leaves_the_other_channels_alone(rotary_dim: int) -> None:
    spec = RopeSpec(theta=100.0, rotary_dim=rotary_dim)
    x = torch.randn(1, 5, 2, 16, generator=torch.Generator().manual_seed(0))
    ours = rotate(x, *RotaryTable(spec)(torch.arange(5.0)))
    assert torch.equal(ours[..., rotary_dim:], x[..., rotary_dim:])
    half = rotary_dim // 2
    for t in range(5):
        for i in range(half):
            angle = t * 100.0 ** (-2 * i / rotary_dim)
            turned = torch.complex(x[0, t, :, i].double(), x[0, t, :, i + half].double()) * complex(
                math.cos(angle), math.sin(angle)
            )
            torch.testing.assert_close(ours[0, t, :, i].double(), turned.real, rtol=0, atol=1e-6)
            torch.testing.assert_close(ours[0, t, :, i + half].double(), turned.imag, rtol=0, atol=1e-6)


def test_tables_are_real_on_a_decoder_built_without_memory() -> None:
    with torch.device("meta"):
        table = RotaryTable(RopeSpec(theta=10_000.0, rotary_dim=64, factor=32.0, **YARN))
    assert table.inv_freq.device.type == "cpu" and table.state_dict() == {}
