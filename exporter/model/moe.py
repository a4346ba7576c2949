"""Mixture of experts.  Letters: N tokens, D hidden_size, E experts, I intermediate_size, k experts per token."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from exporter.model.mlp import activation
from exporter.model.parts import FeedForward
from exporter.spec import MoESpec


class Experts(torch.nn.Module):
    """The experts' weights, stacked: gate and up ``[E, I, D]``, down ``[E, D, I]``."""

    def __init__(self, spec: MoESpec, hidden_size: int) -> None:
        super().__init__()
        num, inner = spec.num_experts, spec.intermediate_size
        self.gate_proj = torch.nn.Parameter(torch.empty(num, inner, hidden_size))
        self.up_proj = torch.nn.Parameter(torch.empty(num, inner, hidden_size))
        self.down_proj = torch.nn.Parameter(torch.empty(num, hidden_size, inner))
        if spec.expert_bias:
            self.gate_bias = torch.nn.Parameter(torch.empty(num, inner))
            self.up_bias = torch.nn.Parameter(torch.empty(num, inner))
            self.down_bias = torch.nn.Parameter(torch.empty(num, hidden_size))
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.02)


class MoE(FeedForward, spec=MoESpec):
    """Every expert runs on every token and is weighted, 0 where it was not chosen.

    Static shapes and no data-dependent gather: which experts a token takes never shapes the graph. Router and experts
    are no sites: they are not quantised.
    """

    def __init__(self, spec: MoESpec, hidden_size: int) -> None:
        super().__init__(spec, hidden_size)
        self.spec = spec
        self.router = torch.nn.Linear(hidden_size, spec.num_experts, bias=spec.router_bias)
        self.experts = Experts(spec, hidden_size)
        self.activation = activation(spec.activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[1, N, D]`` to ``[1, N, D]``."""
        tokens = x[0]
        weights = self.routing_weights(self.router(tokens))
        outputs = [self.expert(tokens, e) * weights[:, e : e + 1] for e in range(self.spec.num_experts)]
        return torch.stack(outputs).sum(0)[None]

    def routing_weights(self, scores: torch.Tensor) -> torch.Tensor:
        """Router scores ``[N, E]`` to expert weights ``[N, E]``, zero outside each token's k highest."""
        if self.spec.routing == "softmax_topk":
            scores = torch.softmax(scores, -1)
        chosen, index = torch.topk(scores, self.spec.num_experts_per_tok, dim=-1)
        if self.spec.routing == "topk_softmax":
            chosen = torch.softmax(chosen, -1)
        elif self.spec.normalize_topk:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        experts = torch.arange(self.spec.num_experts)
        return torch.where(index[:, :, None] == experts, chosen[:, :, None], 0.0).sum(1)

    def expert(self, tokens: torch.Tensor, e: int) -> torch.Tensor:
        w = self.experts
        biased = self.spec.expert_bias
        gate = F.linear(tokens, w.gate_proj[e], w.gate_bias[e] if biased else None)
        up = F.linear(tokens, w.up_proj[e], w.up_bias[e] if biased else None)
        if self.spec.clamp_limit is not None:
            gate = gate.clamp(max=self.spec.clamp_limit)
            up = up.clamp(min=-self.spec.clamp_limit, max=self.spec.clamp_limit)
            inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        else:
            inner = self.activation(gate) * up
        return F.linear(inner, w.down_proj[e], w.down_bias[e] if biased else None)
