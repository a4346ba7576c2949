"""The gated MLP.  Letters: B batch, Q query_len, D hidden_size, I intermediate_size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from exporter.spec import Activation, MLPSpec


def activation(name: Activation) -> Callable[[torch.Tensor], torch.Tensor]:
    if name == "silu":
        return F.silu
    if name == "gelu_tanh":
        return lambda x: F.gelu(x, approximate="tanh")
    return F.gelu


class MLP(torch.nn.Module):
    """``down(act(gate(x)) * up(x))``, ``[B, Q, D]`` to ``[B, Q, D]``."""

    def __init__(self, spec: MLPSpec, hidden_size: int) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(hidden_size, spec.intermediate_size, bias=spec.bias)
        self.up_proj = torch.nn.Linear(hidden_size, spec.intermediate_size, bias=spec.bias)
        self.down_proj = torch.nn.Linear(spec.intermediate_size, hidden_size, bias=spec.bias)
        self.activation = activation(spec.activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
