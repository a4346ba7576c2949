"""The gated MLP.  Letters: B batch, Q query_len, D hidden_size, I intermediate_size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F

from exporter.model.parts import FeedForward, Site
from exporter.spec import Activation, MLPSpec


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU's tanh form (Hendrycks & Gimpel 2016), ``x / 2 * (1 + tanh(u))``, as ``x * sigmoid(2 u)``.

    Spelled out because ExecuTorch 1.5.1's XNNPACK partitioner takes ``aten.gelu(approximate="tanh")`` and computes the
    erf form, about 1e-3 away.
    """
    return x * torch.sigmoid(x * (x * x * (2 * GELU_SCALE * 0.044715) + 2 * GELU_SCALE))


GELU_SCALE = math.sqrt(2 / math.pi)


def activation(name: Activation) -> Callable[[torch.Tensor], torch.Tensor]:
    functions: dict[Activation, Callable[[torch.Tensor], torch.Tensor]]
    functions = {"silu": F.silu, "gelu_tanh": gelu_tanh, "gelu": F.gelu}
    return functions[name]


class MLP(FeedForward, spec=MLPSpec):
    """``down(act(gate(x)) * up(x))``, ``[B, Q, D]`` to ``[B, Q, D]``."""

    def __init__(self, spec: MLPSpec, hidden_size: int) -> None:
        super().__init__(spec, hidden_size)
        self.gate_proj = torch.nn.Linear(hidden_size, spec.intermediate_size, bias=spec.bias)
        self.up_proj = torch.nn.Linear(hidden_size, spec.intermediate_size, bias=spec.bias)
        self.down_proj = torch.nn.Linear(spec.intermediate_size, hidden_size, bias=spec.bias)
        self.activation = activation(spec.activation)

    @property
    def sites(self) -> Sequence[Site]:
        return (Site(("gate_proj", "up_proj")), Site(("down_proj",), source="up_proj"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
