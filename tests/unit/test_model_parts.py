"""Norms, activations, MLP, experts, convolution: each against its definition in float64."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from oracle import mlp, short_conv, token_through_experts

from exporter.cache.plain import PlainKernels
from exporter.model.convolution import ShortConv
from exporter.model.mlp import MLP, activation, gelu_tanh
from exporter.model.moe import MoE
from exporter.model.norms import RMSNorm
from exporter.model.parts import Call
from exporter.spec import Activation, MLPSpec, MoESpec, ShortConvSpec

HIDDEN = 16


def randomized(module: torch.nn.Module, scale: float = 0.5) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return module.requires_grad_(False)


def named(module: torch.nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    return {f"{prefix}.{name}": tensor.double() for name, tensor in module.named_parameters()}


def random_rows(length: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(length, HIDDEN, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_rms_norm(scale: float, eps: float) -> None:
    norm = RMSNorm(HIDDEN, eps)
    norm.weight.data.copy_(torch.linspace(-2, 2, HIDDEN))
    x = random_rows(3) * scale
    expected = [
        [
            v / math.sqrt(sum(u * u for u in row) / HIDDEN + eps) * w
            for v, w in zip(row, norm.weight.tolist(), strict=True)
        ]
        for row in x.tolist()
    ]
    torch.testing.assert_close(norm(x).detach(), torch.tensor(expected), rtol=1e-6, atol=1e-7)


def test_gelu_tanh_is_the_tanh_form_and_not_the_erf_form() -> None:
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([0.0, -50.0, 50.0, -1e4, 1e4])])
    reference = torch.nn.functional.gelu(x.double(), approximate="tanh")
    assert (gelu_tanh(x).double() - reference).abs().max() < 1e-6
    assert (gelu_tanh(x[:4001]) - torch.nn.functional.gelu(x[:4001])).abs().max() > 1e-4
    assert gelu_tanh(torch.tensor([0.0, -1e4, 1e4])).tolist() == [0.0, 0.0, 1e4]


@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("bias", [False, True])
def test_mlp(name: Activation, bias: bool) -> None:
    spec = MLPSpec(intermediate_size=24, activation=name, bias=bias)
    module = randomized(MLP(spec, HIDDEN))
    x = random_rows(5)
    expected = mlp(spec, named(module, "feed_forward"), x.double())
    torch.testing.assert_close(module(x[None])[0].double(), expected, rtol=0, atol=1e-5)


def test_three_activations_are_three_functions() -> None:
    x = torch.linspace(-3, 3, 50)
    silu, gelu, gelu_of_tanh = (activation(name)(x) for name in ("silu", "gelu", "gelu_tanh"))
    assert (silu - gelu).abs().max() > 0.1 and (gelu - gelu_of_tanh).abs().max() > 1e-4


ROUTINGS: list[dict[str, Any]] = [
    {"routing": "topk_softmax"},
    {"routing": "softmax_topk"},
    {"routing": "softmax_topk", "normalize_topk": True},
]


@pytest.mark.parametrize(("routing", "picked"), product(ROUTINGS, [1, 2, 4]))
@pytest.mark.parametrize(
    "changes",
    [
        {"activation": "silu"},
        {"activation": "gelu_tanh", "router_bias": True},
        {"activation": "silu", "expert_bias": True},
        {"activation": "silu", "clamp_limit": 0.7, "expert_bias": True, "router_bias": True},
    ],
)
def test_experts(routing: dict[str, Any], picked: int, changes: dict[str, Any]) -> None:
    spec = MoESpec(num_experts=4, num_experts_per_tok=picked, intermediate_size=12, **routing, **changes)
    module = randomized(MoE(spec, HIDDEN))
    x = random_rows(7)
    weights = named(module, "feed_forward")
    expected = torch.stack([token_through_experts(spec, weights, row) for row in x.double()])
    torch.testing.assert_close(module(x[None])[0].double(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_an_expert_that_was_not_chosen_weighs_exactly_nothing(routing: dict[str, Any]) -> None:
    spec = MoESpec(num_experts=8, num_experts_per_tok=3, intermediate_size=4, activation="silu", **routing)
    scores = torch.randn(20, 8, generator=torch.Generator().manual_seed(0))
    weights = MoE(spec, HIDDEN).routing_weights(scores)
    assert torch.equal((weights > 0).sum(1), torch.full((20,), 3))
    for row, score in zip(weights, scores, strict=True):
        assert set(row.nonzero().flatten().tolist()) == set(score.argsort(descending=True)[:3].tolist())
    sums_to_one = routing["routing"] == "topk_softmax" or routing.get("normalize_topk", False)
    assert torch.allclose(weights.sum(1), torch.ones(20), atol=1e-6) == sums_to_one


def test_equal_scores_still_choose_as_many_experts_as_asked_for() -> None:
    spec = MoESpec(num_experts=4, num_experts_per_tok=2, intermediate_size=4, activation="silu", routing="topk_softmax")
    weights = MoE(spec, HIDDEN).routing_weights(torch.zeros(3, 4))
    assert weights.sort(1).values.tolist() == [[0.0, 0.0, 0.5, 0.5]] * 3


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kernel_size", [2, 3, 6])
@pytest.mark.parametrize("splits", [[11], [1] * 11, [2, 9], [7, 1, 3], [1, 2, 8]])
def test_short_convolution_in_any_split(kernel_size: int, bias: bool, splits: list[int]) -> None:
    spec = ShortConvSpec(kernel_size=kernel_size, bias=bias)
    module = randomized(ShortConv(spec, HIDDEN, 1e-6, PlainKernels()), 0.2)
    x = random_rows(11)
    state, parts, offset = torch.zeros(1, kernel_size - 1, HIDDEN), [], 0
    for chunk in x.split(splits):
        call = Call(len(chunk), offset, write_first=len(chunk) == 1, rotary={None: None})
        parts.append(module(chunk[None], call, [state])[0])
        offset += len(chunk)
    weights = named(module, "mixer")
    torch.testing.assert_close(torch.cat(parts).double(), short_conv(spec, weights, x.double()), rtol=0, atol=1e-5)
    gate, _, value = (x @ module.in_proj.weight.T + (module.in_proj.bias if bias else 0.0)).chunk(3, -1)
    torch.testing.assert_close(state[0], (gate * value)[-(kernel_size - 1) :], rtol=0, atol=1e-5)
