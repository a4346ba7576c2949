"""Any window, slack, head counts and split: exported == eager (to the bit, but see `agree`) == an uncached oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import oracle_logits
from tiny_models import KERNELS, agree, attention, call, decoder_of, model, one_thread, states_of, token_ids  # noqa: F401

from exporter.programs import Limits, trace
from exporter.spec import PROGRAMS

CONTEXT, CHUNK = 64, 25
RELATIVE = 6e-6  # of the largest logit: float32 through two layers


@settings(deadline=None, max_examples=8, derandomize=True)
@given(
    window=st.integers(1, 9),
    slack=st.integers(0, 4),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    splits=st.lists(st.integers(1, CHUNK), min_size=3, max_size=9).filter(lambda s: 30 <= sum(s) <= CONTEXT),
)
@pytest.mark.parametrize("kernels", KERNELS)
def test_exported_equals_eager_equals_the_oracle(
    *, kernels: str, window: int, slack: int, kv_heads: int, group: int, splits: list[int]
) -> None:
    heads = {"num_attention_heads": kv_heads * group, "num_key_value_heads": kv_heads}
    spec = model(attention(window, **heads), attention(None, theta=1_000_000.0, **heads))
    decoder = decoder_of(spec, kernels=kernels, slack=slack, context=CONTEXT)
    limits = Limits(max_context_length=CONTEXT, max_prefill_chunk=CHUNK)
    exported = {name: trace(decoder, kind, limits).module() for name, kind in PROGRAMS.items()}
    ids = token_ids(sum(splits))
    expected = oracle_logits(spec, dict(decoder.named_parameters()), ids)
    states, twins, offset = states_of(decoder, torch.nan), states_of(decoder, torch.nan), 0
    for length in splits:
        exactly = kernels == "plain" or length == 1
        chunk = ids[offset : offset + length]
        eager = call(decoder, chunk, offset, states, length == 1)
        ours = call(exported["main" if length == 1 else "prefill"], chunk, offset, twins)
        offset += length
        assert agree([ours], [eager], exactly=exactly), offset
        difference = (ours.double() - expected[offset - 1]).abs().max()
        assert difference <= RELATIVE * expected.abs().max(), (offset, float(difference))
    assert agree(twins, states, exactly=kernels == "plain")
