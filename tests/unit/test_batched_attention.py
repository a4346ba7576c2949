"""Attention as two batched products against the definition."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.backends.executorch.kernels import batched_attention
from exporter.cache import masks
from exporter.cache.interface import Extras
from exporter.cache.plain import attention


@settings(max_examples=60, deadline=None)
@given(
    query_len=st.integers(1, 9), more=st.integers(0, 9), kv_heads=st.integers(1, 3), group=st.integers(1, 4),
    seed=st.integers(0, 9),
)  # fmt: skip
def test_batched_attention_is_attention(query_len: int, more: int, kv_heads: int, group: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = query_len + more
    query = torch.randn(1, query_len, kv_heads * group, 8, generator=generator)
    keys, values = (torch.randn(1, rows, kv_heads, 8, generator=generator) for _ in range(2))
    visible = torch.rand(query_len, rows, generator=generator) < 0.5
    visible[torch.arange(query_len), torch.randint(rows, (query_len,), generator=generator)] = True  # one at least
    wanted = attention(query, keys, values, visible, Extras(0.3))
    got = batched_attention(query, keys, values, masks.additive(visible, torch.float32), 0.3)
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-6)


def test_a_key_that_is_not_visible_does_not_matter_at_all() -> None:
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(1, 3, 2, 8, generator=generator) for _ in range(3))
    visible = torch.tensor([[True, False, False], [True, True, False], [True, True, False]])
    mask = masks.additive(visible, torch.float32)
    before = batched_attention(query, keys, values, mask, 1.0)
    keys[:, 2], values[:, 2] = 1e4, -1e4
    assert torch.equal(batched_attention(query, keys, values, mask, 1.0), before)
