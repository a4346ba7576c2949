"""Slow, obvious oracles in float64: the whole sequence at once, no cache, a loop over queries.

They take a decoder's weights by name and nothing else of it: masks, rotation, attention, experts and convolution are
written here from their definitions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from exporter.spec import AttentionSpec, MLPSpec, ModelSpec, MoESpec, RopeSpec, ShortConvSpec

Weights = Mapping[str, torch.Tensor]


def int8_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[..., D]`` to int8 and float32 scales ``[..., 1]`` from the definition, a row at a time, in numpy."""
    source = rows.numpy()
    integers = np.zeros(source.shape, np.int8)
    scales = np.zeros((*source.shape[:-1], 1), np.float32)
    for place in np.ndindex(*source.shape[:-1]):
        row = source[place]
        scale = max(np.float32(np.abs(row).max()) / np.float32(127), np.finfo(np.float32).tiny)
        integers[place], scales[place] = np.rint(row / scale), scale
    return torch.from_numpy(integers), torch.from_numpy(scales)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """query ``[T, H, D]``, keys and values ``[T, K, D]``: each query over the last `window` keys, itself included."""
    length, num_heads, _ = query.shape
    group = num_heads // keys.shape[1]
    out = torch.zeros_like(query, dtype=torch.float64)
    for t in range(length):
        first = 0 if window is None else max(0, t - window + 1)
        for h in range(num_heads):
            k, v = (x[first : t + 1, h // group].double() for x in (keys, values))
            scores = k @ query[t, h].double() * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            exponentials = scores.exp()
            total = exponentials.sum() + (0.0 if sinks is None else sinks[h].double().exp())
            out[t, h] = exponentials / total @ v
    return out


def oracle_logits(spec: ModelSpec, weights: Weights, ids: Sequence[int]) -> torch.Tensor:
    """Logits ``[T, V]`` of every token."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    x = w["embed_tokens.weight"][list(ids)] * spec.embedding_scale
    for index, layer in enumerate(spec.layers):
        p = {name.removeprefix(f"layers.{index}."): t for name, t in w.items() if name.startswith(f"layers.{index}.")}
        normed = _norm(x, p["input_norm.weight"], spec.norm_eps)
        if isinstance(layer.mixer, ShortConvSpec):
            mixed = short_conv(layer.mixer, p, normed)
        else:
            mixed = _attention(layer.mixer, p, normed, spec.norm_eps)
        x = x + (_norm(mixed, p["post_mixer_norm.weight"], spec.norm_eps) if layer.post_norms else mixed)
        normed = _norm(x, p["feed_forward_norm.weight"], spec.norm_eps)
        if isinstance(layer.feed_forward, MoESpec):
            fed = torch.stack([token_through_experts(layer.feed_forward, p, row) for row in normed])
        else:
            fed = mlp(layer.feed_forward, p, normed)
        x = x + (_norm(fed, p["post_feed_forward_norm.weight"], spec.norm_eps) if layer.post_norms else fed)
    head = w["embed_tokens.weight"] if spec.tie_word_embeddings else w["lm_head.weight"]
    logits = _norm(x, w["norm.weight"], spec.norm_eps) @ head.T
    cap = spec.final_logit_softcap
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / ((x**2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _linear(p: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return x @ p[f"{name}.weight"].T + p.get(f"{name}.bias", torch.zeros(()))


def _turn(rope: RopeSpec, x: torch.Tensor) -> torch.Tensor:
    """``[T, H, D]``: channels i and i + R/2 are one complex number that turns by ``t * theta ** (-2i / R)``."""
    assert rope.scaling == "none"
    half = rope.rotary_dim // 2
    x = x.clone()
    for t in range(len(x)):
        for i in range(half):
            angle = t * rope.theta ** (-2 * i / rope.rotary_dim)
            a, b = x[t, :, i].clone(), x[t, :, i + half].clone()
            x[t, :, i] = a * math.cos(angle) - b * math.sin(angle)
            x[t, :, i + half] = a * math.sin(angle) + b * math.cos(angle)
    return x


def _attention(spec: AttentionSpec, p: Weights, x: torch.Tensor, eps: float) -> torch.Tensor:
    query = _linear(p, "mixer.q_proj", x).view(len(x), spec.num_attention_heads, spec.head_dim)
    keys = _linear(p, "mixer.k_proj", x).view(len(x), spec.num_key_value_heads, spec.head_dim)
    values = _linear(p, "mixer.v_proj", x).view(len(x), spec.num_key_value_heads, spec.head_dim)
    if spec.qk_norm:
        query, keys = _norm(query, p["mixer.q_norm.weight"], eps), _norm(keys, p["mixer.k_norm.weight"], eps)
    if spec.rope is not None:
        query, keys = _turn(spec.rope, query), _turn(spec.rope, keys)
    sinks = p["mixer.sinks"] if spec.sinks else None
    out = attend(query, keys, values, spec.scale, window=spec.window, softcap=spec.logit_softcap, sinks=sinks)
    return _linear(p, "mixer.o_proj", out.view(len(x), -1))


def short_conv(spec: ShortConvSpec, p: Weights, x: torch.Tensor) -> torch.Tensor:
    gate_in, gate_out, value = _linear(p, "mixer.in_proj", x).chunk(3, -1)
    inputs = gate_in * value
    kernel = p["mixer.conv.weight"]  # [D, 1, L]; the last tap meets the current token
    out = torch.zeros_like(inputs) + p.get("mixer.conv.bias", torch.zeros(()))
    for t in range(len(x)):
        for back in range(min(spec.kernel_size, t + 1)):
            out[t] += kernel[:, 0, spec.kernel_size - 1 - back] * inputs[t - back]
    return _linear(p, "mixer.out_proj", gate_out * out)


def _activate(name: str, x: torch.Tensor) -> torch.Tensor:
    if name == "silu":
        return x / (1 + torch.exp(-x))
    if name == "gelu_tanh":
        return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x / 2 * (1 + torch.erf(x / math.sqrt(2)))


def mlp(spec: MLPSpec, p: Weights, x: torch.Tensor) -> torch.Tensor:
    gate = _activate(spec.activation, _linear(p, "feed_forward.gate_proj", x))
    return _linear(p, "feed_forward.down_proj", gate * _linear(p, "feed_forward.up_proj", x))


def token_through_experts(spec: MoESpec, p: Weights, token: torch.Tensor) -> torch.Tensor:
    """One token ``[D]``: only the experts it goes to are computed."""
    scores = _linear(p, "feed_forward.router", token).tolist()
    best = sorted(range(spec.num_experts), key=lambda e: -scores[e])[: spec.num_experts_per_tok]
    among = best if spec.routing == "topk_softmax" else range(spec.num_experts)
    total = sum(math.exp(scores[e]) for e in among)
    weight = {e: math.exp(scores[e]) / total for e in best}
    if spec.routing == "softmax_topk" and spec.normalize_topk:
        picked = sum(weight.values())
        weight = {e: share / picked for e, share in weight.items()}
    out = torch.zeros_like(token)
    for e in best:
        gate, up, down = (p[f"feed_forward.experts.{x}_proj"][e] for x in ("gate", "up", "down"))
        bias = {x: p[f"feed_forward.experts.{x}_bias"][e] if spec.expert_bias else 0.0 for x in ("gate", "up", "down")}
        g, u = gate @ token + bias["gate"], up @ token + bias["up"]
        if spec.clamp_limit is None:
            inner = _activate(spec.activation, g) * u
        else:
            g = torch.minimum(g, torch.tensor(spec.clamp_limit, dtype=g.dtype))
            u = torch.minimum(torch.maximum(u, torch.tensor(-spec.clamp_limit, dtype=u.dtype)),
                              torch.tensor(spec.clamp_limit, dtype=u.dtype))  # fmt: skip
            inner = (u + 1) * g / (1 + torch.exp(-1.702 * g))
        out = out + weight[e] * (down @ inner + bias["down"])
    return out
