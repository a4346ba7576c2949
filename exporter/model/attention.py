"""Grouped-query attention over a caller-owned cache.

Letters: Q query_len, C capacity, H heads, K KV heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from exporter.cache import masks
from exporter.cache.interface import CacheKernels, Extras
from exporter.model.norms import RMSNorm
from exporter.model.parts import Call, Mixer, Site
from exporter.model.rope import rotate
from exporter.spec import AttentionSpec, StateSpec


class Attention(Mixer, spec=AttentionSpec):
    """One attention layer, sliding or global, as its spec says."""

    def __init__(
        self, spec: AttentionSpec, hidden_size: int, norm_eps: float, kernels: CacheKernels,
        states: Sequence[StateSpec] = (),
    ) -> None:  # fmt: skip
        super().__init__(spec, hidden_size, norm_eps, kernels)
        self.spec, self.rope = spec, spec.rope
        # As it was planned: never more than the context.
        self.window = states[0].window if states else spec.window
        query_size, kv_size = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
        self.q_proj = torch.nn.Linear(hidden_size, query_size, bias=spec.qkv_bias)
        self.k_proj = torch.nn.Linear(hidden_size, kv_size, bias=spec.qkv_bias)
        self.v_proj = torch.nn.Linear(hidden_size, kv_size, bias=spec.qkv_bias)
        self.o_proj = torch.nn.Linear(query_size, hidden_size, bias=spec.output_bias)
        if spec.qk_norm:
            self.q_norm = RMSNorm(spec.head_dim, norm_eps)
            self.k_norm = RMSNorm(spec.head_dim, norm_eps)
        if spec.sinks:
            self.sinks = torch.nn.Parameter(torch.zeros(spec.num_attention_heads))

    @property
    def sites(self) -> Sequence[Site]:
        """Channel c of a head's output is a mean of channel c of its KV head's values."""
        by_values = Site(("o_proj",), source="v_proj", groups=self.spec.num_key_value_heads)
        return (Site(("q_proj", "k_proj", "v_proj")), by_values)

    def forward(self, normed: torch.Tensor, call: Call, states: list[torch.Tensor]) -> torch.Tensor:
        """See `Mixer.forward`."""
        offset, window, rotary = call.offset, self.window, call.rotary[self.rope]
        heads, kv_heads, head_dim = self.spec.num_attention_heads, self.spec.num_key_value_heads, self.spec.head_dim
        # The one length a view leaves open is the dynamic one: XNNPACK takes no symbolic sizes.
        query = self.q_proj(normed).view(1, -1, heads, head_dim)
        keys = self.k_proj(normed).view(1, -1, kv_heads, head_dim)
        values = self.v_proj(normed).view(1, -1, kv_heads, head_dim)
        if self.spec.qk_norm:
            query, keys = self.q_norm(query), self.k_norm(keys)
        if rotary is not None:
            query, keys = rotate(query, *rotary), rotate(keys, *rotary)
        extras = Extras(self.spec.scale, self.spec.logit_softcap, self.sinks if self.spec.sinks else None)
        if window is None:
            full = self.kernels.full(states)
            rows = full.update_and_fetch(full.encode(keys, values), offset)
            attended = self.kernels.attend_causal(query, rows, offset, extras)
        else:
            ring = self.kernels.ring(states, window)
            chunk, capacity = ring.encode(keys, values), states[0].shape[1]
            if not call.write_first:
                rows = ring.fetch_and_concat(chunk, offset)
                visible = ring.concat_mask(offset, call.query_len)
                attended = self.kernels.attend_masked(query, rows, visible, extras)
                ring.update(chunk, offset)
            elif capacity == window:  # softmax does not mind the order of slots: no mask
                rows = ring.update_and_fetch(chunk, offset)
                attended = self.kernels.attend_causal(query, rows, masks.last_live_row(offset, capacity), extras)
            else:
                rows = ring.update_and_fetch(chunk, offset)
                visible = masks.ring_window_causal_mask(offset + 1, capacity, window)
                attended = self.kernels.attend_masked(query, ring.written(rows, offset + 1), visible, extras)
        return self.o_proj(attended.reshape(1, -1, heads * head_dim))
