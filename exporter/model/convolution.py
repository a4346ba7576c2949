"""The gated short causal convolution (LFM2).  Letters: Q query_len, L kernel_size, D hidden_size, `offset` = S - Q."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from exporter.spec import ShortConvSpec


class ShortConv(torch.nn.Module):
    """``out(C * conv(B * x))`` with ``B, C, x = in_proj(hidden)``; its state is the last L - 1 inputs of the conv."""

    def __init__(self, spec: ShortConvSpec, hidden_size: int) -> None:
        super().__init__()
        self.in_proj = torch.nn.Linear(hidden_size, 3 * hidden_size, bias=spec.bias)
        self.conv = torch.nn.Conv1d(
            hidden_size, hidden_size, spec.kernel_size, groups=hidden_size, bias=spec.bias
        )  # padding is the state's business
        self.out_proj = torch.nn.Linear(hidden_size, hidden_size, bias=spec.bias)
        self.history = spec.kernel_size - 1

    def forward(self, hidden: torch.Tensor, state: torch.Tensor, offset: int) -> torch.Tensor:
        """hidden ``[1, Q, D]``, state ``[1, L-1, D]`` (written in place) to ``[1, Q, D]``."""
        query_len = hidden.shape[1]
        gate_in, gate_out, x = self.in_proj(hidden).chunk(3, dim=-1)
        # Row i of the state is position offset - (L-1) + i; before position 0 there was nothing, whatever it holds.
        seen = torch.arange(self.history) + (offset - self.history) >= 0
        inputs = torch.cat([torch.where(seen[None, :, None], state, 0.0), gate_in * x], 1)
        convolved = F.conv1d(inputs.transpose(1, 2), self.conv.weight, self.conv.bias, groups=self.conv.groups)
        state.copy_(inputs.narrow(1, query_len, self.history))
        return self.out_proj(gate_out * convolved.transpose(1, 2))
