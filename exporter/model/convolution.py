"""The gated short causal convolution (LFM2).  Letters: Q query_len, L kernel_size, D hidden_size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from exporter.cache.interface import CacheKernels
from exporter.model.parts import Call, Mixer, Site
from exporter.spec import ShortConvSpec, StateSpec


class ShortConv(Mixer, spec=ShortConvSpec):
    """``out(C * conv(B * x))`` with ``B, C, x = in_proj(normed)``; its state ``[1, L-1, D]`` holds the last L - 1
    inputs of the conv."""

    def __init__(
        self, spec: ShortConvSpec, hidden_size: int, norm_eps: float, kernels: CacheKernels,
        states: Sequence[StateSpec] = (),
    ) -> None:  # fmt: skip
        super().__init__(spec, hidden_size, norm_eps, kernels)
        self.in_proj = torch.nn.Linear(hidden_size, 3 * hidden_size, bias=spec.bias)
        self.conv = torch.nn.Conv1d(
            hidden_size, hidden_size, spec.kernel_size, groups=hidden_size, bias=spec.bias
        )  # padding is the state's business
        self.out_proj = torch.nn.Linear(hidden_size, hidden_size, bias=spec.bias)
        self.history = spec.kernel_size - 1

    @property
    def sites(self) -> Sequence[Site]:
        """The gate on the way out is a factor of what comes out: its product with the convolution is the input."""
        size = self.out_proj.in_features
        return (Site(("in_proj",)), Site(("out_proj",), source="in_proj", rows=slice(size, 2 * size)))

    def forward(self, normed: torch.Tensor, call: Call, states: list[torch.Tensor]) -> torch.Tensor:
        """See `Mixer.forward`."""
        (state,) = states
        gate_in, gate_out, x = self.in_proj(normed).chunk(3, dim=-1)
        # Row i of the state is position offset - (L-1) + i; before position 0 there was nothing, whatever it holds.
        seen = torch.arange(self.history) + (call.offset - self.history) >= 0
        inputs = torch.cat([torch.where(seen[None, :, None], state, 0.0), gate_in * x], 1)
        convolved = F.conv1d(inputs.transpose(1, 2), self.conv.weight, self.conv.bias, groups=self.conv.groups)
        state.copy_(inputs.narrow(1, call.query_len, self.history))
        return self.out_proj(gate_out * convolved.transpose(1, 2))
