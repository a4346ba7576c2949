"""Both cache implementations against a complete log that is no ring.

An attention layer whose projections pick query, keys and values out of the hidden state runs chunk after chunk over
the caller's tensors; the oracle keeps every row ever written and recomputes each query over the last W of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import attend, int8_rows
from tiny_models import DTYPES, KERNELS, CacheDType, agree, kernels_named, one_thread  # noqa: F401

from exporter.cache import masks
from exporter.cache.interface import Extras
from exporter.cache.plain import PlainKernels, attention
from exporter.model.attention import Attention
from exporter.model.convolution import ShortConv
from exporter.model.parts import Call
from exporter.spec import AttentionSpec, ShortConvSpec

TOLERANCE = {"rtol": 0.0, "atol": 2e-6}  # float32 sums of at most a hundred terms of size 1
NAN = float("nan")


class Layer:
    """One attention layer over its own state, fed with rows ``[T, (H + 2K) * D]`` of query, keys and values."""

    def __init__(
        self, kernels: str, *, window: int | None, rows: int, heads: int = 4, kv_heads: int = 2, head_dim: int = 8,
        fill: float | torch.Tensor = 0.0, softcap: float | None = None, sinks: bool = False,
        dtype: CacheDType = "float32",
    ) -> None:  # fmt: skip
        spec = AttentionSpec(
            num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, window=window,
            scale=0.3, rope=None, logit_softcap=softcap, sinks=sinks,  # no kernel takes 0.3 for granted
        )  # fmt: skip
        self.spec, self.window = spec, window
        sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        self.width = sum(sizes)
        self.module = Attention(spec, self.width, 1e-6, kernels_named(kernels)).requires_grad_(False)
        query, keys, values = torch.eye(self.width).split(sizes)
        self.module.q_proj.weight.copy_(query)
        self.module.k_proj.weight.copy_(keys)
        self.module.v_proj.weight.copy_(values)
        self.module.o_proj.weight.copy_(query.T)
        if sinks:
            self.module.sinks.copy_(torch.linspace(-1, 1, heads))
        self.dtype = dtype
        # The operators take float16 rows with float16 queries and results.
        rounded = dtype == "float16" and kernels != "plain" and not (softcap or sinks)
        self.tolerance = {"rtol": 2**-11, "atol": 1e-3} if rounded else TOLERANCE
        old = fill if isinstance(fill, torch.Tensor) else torch.full((1, rows, kv_heads, head_dim), fill)
        if dtype == "int8" and not isinstance(fill, torch.Tensor):  # -128 is what no quantiser stores
            kept = (torch.full_like(old, -128, dtype=torch.int8), old[..., :1])
        else:
            kept = self.kept(old)
        self.states = [tensor.clone() for _ in range(2) for tensor in kept]
        self.offset = 0

    def kept(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Float rows ``[..., D]`` as the cache keeps them, from the definition."""
        return int8_rows(rows) if self.dtype == "int8" else (rows.to(getattr(torch, self.dtype)),)

    def seen(self, rows: torch.Tensor) -> torch.Tensor:
        """Float rows as attention sees them."""
        first, *scales = self.kept(rows)
        return first * scales[0] if scales else first.float()

    def step(self, rows: torch.Tensor) -> torch.Tensor:
        """``[Q, H, D]``: one token goes through decode, more through prefill."""
        call = Call(len(rows), self.offset, write_first=len(rows) == 1, rotary={None: None})
        out = self.module(rows[None], call, self.states)
        self.offset += len(rows)
        return out[0, :, : self.spec.num_attention_heads * self.spec.head_dim].view(len(rows), -1, self.spec.head_dim)

    def play(self, rows: torch.Tensor, splits: Sequence[int]) -> torch.Tensor:
        assert sum(splits) == len(rows)
        return torch.cat([self.step(chunk) for chunk in rows.split(list(splits))])

    def split(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        spec = self.spec
        heads = rows.view(len(rows), -1, spec.head_dim)
        query, keys, values = heads.split([spec.num_attention_heads, *[spec.num_key_value_heads] * 2], 1)
        return query, keys, values

    def oracle(self, rows: torch.Tensor) -> torch.Tensor:
        sinks = self.module.sinks if self.spec.sinks else None
        query, keys, values = self.split(rows)
        if self.dtype == "int8" and not (self.spec.logit_softcap or sinks is not None):
            query = self.seen(query)
        return attend(
            query, self.seen(keys), self.seen(values), self.spec.scale,
            window=self.window, softcap=self.spec.logit_softcap, sinks=sinks,
        ).float()  # fmt: skip

    def assert_ring_holds(self, rows: torch.Tensor) -> None:
        """Slot p mod C holds position p for the newest C positions, bit for bit."""
        _, keys, values = self.split(rows)
        for state, log in zip(self.states, (*self.kept(keys), *self.kept(values)), strict=True):
            capacity = state.shape[1]
            for position in range(max(0, len(rows) - capacity), len(rows)):
                assert torch.equal(state[0, position % capacity], log[position]), position


def random_rows(length: int, width: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.randn(length, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("capacity", [8, 11, 16])
def test_every_chunk_length_up_to_five_windows(kernels: str, capacity: int, dtype: CacheDType) -> None:
    rows = random_rows(5 + 40 + 1 + 40 + 2)
    expected = Layer(kernels, window=8, rows=capacity, dtype=dtype).oracle(rows)
    for length in range(1, 41):
        splits = [5, length, 1, length, 1, 1]
        layer = Layer(kernels, window=8, rows=capacity, dtype=dtype)
        part = rows[: sum(splits)]
        torch.testing.assert_close(layer.play(part, splits), expected[: len(part)], **layer.tolerance)
        layer.assert_ring_holds(part)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    kernels=st.sampled_from(KERNELS),
    window=st.integers(1, 20),
    slack=st.integers(0, 12),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([4, 8, 16])),
    splits=st.lists(st.integers(1, 25), min_size=1, max_size=6),
    extras=st.sampled_from([{}, {"softcap": 2.0}, {"sinks": True}, {"softcap": 2.0, "sinks": True}]),
    dtype=st.sampled_from(DTYPES),
)
def test_any_ring_and_any_split(
    *, kernels: str, window: int, slack: int, heads: tuple[int, int, int], splits: list[int], extras: dict[str, Any],
    dtype: CacheDType,
) -> None:  # fmt: skip
    kv_heads, group, head_dim = heads
    layer = Layer(
        kernels, window=window, rows=window + slack, heads=kv_heads * group, kv_heads=kv_heads, head_dim=head_dim,
        fill=NAN, dtype=dtype, **extras,
    )  # fmt: skip
    rows = random_rows(sum(splits), layer.width)
    torch.testing.assert_close(layer.play(rows, splits), layer.oracle(rows), **layer.tolerance)
    layer.assert_ring_holds(rows)


@settings(deadline=None, max_examples=20, derandomize=True)
@given(
    kernels=st.sampled_from(KERNELS),
    splits=st.lists(st.integers(1, 25), min_size=1, max_size=6),
    spare=st.integers(0, 30),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_any_split_over_a_full_cache(
    *, kernels: str, splits: list[int], spare: int, softcap: float | None, sinks: bool, dtype: CacheDType
) -> None:
    rows = sum(splits) + spare
    layer = Layer(kernels, window=None, rows=rows, fill=NAN, softcap=softcap, sinks=sinks, dtype=dtype)
    rows = random_rows(sum(splits))
    torch.testing.assert_close(layer.play(rows, splits), layer.oracle(rows), **layer.tolerance)
    layer.assert_ring_holds(rows)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_ring_of_eight_holds_positions_12_to_19_after_a_chunk_of_twenty(kernels: str) -> None:
    keys, values = torch.full((1, 8, 1, 4), -1.0), torch.full((1, 8, 1, 4), -1.0)
    chunk = torch.arange(20.0).view(1, 20, 1, 1).expand(1, 20, 1, 4).contiguous()
    kernels_named(kernels).ring([keys, values], 8).update((chunk, -chunk), 0)
    assert keys[0, :, 0, 0].tolist() == [16, 17, 18, 19, 12, 13, 14, 15]
    assert torch.equal(values, -keys) and torch.equal(keys, keys[..., :1].expand_as(keys))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernels", KERNELS)
def test_the_ring_step_by_step_around_its_first_wrap(kernels: str, dtype: CacheDType) -> None:
    """A prefill of 6 into a ring of 8, then single tokens across its end."""
    layer = Layer(kernels, window=8, rows=8, dtype=dtype)
    rows = random_rows(12)
    layer.step(rows[:6])
    for newest in range(6, 12):
        before = [state.clone() for state in layer.states]
        layer.step(rows[newest : newest + 1])
        layer.assert_ring_holds(rows[: newest + 1])
        untouched = [slot for slot in range(8) if slot != newest % 8]
        assert all(torch.equal(a[:, untouched], b[:, untouched]) for a, b in zip(layer.states, before, strict=True))


@pytest.mark.parametrize("kernels", KERNELS)
def test_more_than_one_token_is_refused_before_anything_is_written(kernels: str) -> None:
    state = torch.zeros(1, 8, 1, 4)
    ring = kernels_named(kernels).ring([state, state.clone()], 8)
    with pytest.raises(ValueError, match=r"got query_len 2; expected 1.*`prefill`"):
        ring.update_and_fetch((torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4)), 0)
    assert not state.any()


@pytest.mark.parametrize(("capacity", "length"), [(8, 1), (8, 2), (8, 7), (11, 4), (11, 5), (15, 8), (15, 9), (8, 20)])
def test_writing_a_chunk_first_needs_a_ring_of_window_plus_chunk_minus_one(capacity: int, length: int) -> None:
    """A mutant that writes before it reads, whatever Q: this is what the refusal above protects from."""
    window, offset = 8, 13
    layer = Layer("plain", window=window, rows=capacity)
    rows = random_rows(offset + length)
    layer.play(rows[:offset], [offset])
    query, keys, values = layer.split(rows)
    ring = PlainKernels().ring(layer.states, window)
    ring.update((keys[None, offset:], values[None, offset:]), offset)
    held = masks.ring_positions(offset + length, capacity)
    visible = masks.window_visible(torch.arange(offset, offset + length), held, window)
    got = attention(query[None, offset:], *layer.states, visible, Extras(layer.spec.scale))[0]
    difference = (got - layer.oracle(rows)[offset:]).abs().max()
    assert (difference < 2e-6) if capacity >= window + length - 1 else (difference > 0.1)


SHAPES = [(8, 8), (8, 11), (8, 16), (None, 64)]


@pytest.mark.parametrize("extras", [{}, {"softcap": 2.0}, {"sinks": True}], ids=["plain", "softcap", "sinks"])
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("window", "capacity"), SHAPES)
@pytest.mark.parametrize("splits", [[1] * 20, [2, 1, 3, 1, 9, 1], [20, 1, 7], [7, 8, 9, 1]])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_was_never_written_and_what_an_earlier_conversation_left_reach_no_output(
    *, kernels: str, window: int | None, capacity: int, splits: list[int], extras: dict[str, bool], dtype: CacheDType
) -> None:
    rows = random_rows(sum(splits))
    clean, poisoned, stale = (
        Layer(kernels, window=window, rows=capacity, fill=fill, dtype=dtype, **extras)
        for fill in (0.0, NAN, 1e3 * random_rows(capacity, 16, seed=5).view(1, capacity, 2, 8))
    )
    expected = clean.play(rows, splits)
    exactly = kernels == "plain" or max(splits) == 1
    assert torch.isfinite(expected).all()
    assert agree([poisoned.play(rows, splits)], [expected], exactly=exactly)
    assert agree([stale.play(rows, splits)], [expected], exactly=exactly)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernels", KERNELS)
def test_poison_beyond_the_blocks_that_attention_kernels_read_at_a_time(kernels: str, dtype: CacheDType) -> None:
    rows = random_rows(530)
    clean, poisoned = (Layer(kernels, window=None, rows=1100, fill=fill, dtype=dtype) for fill in (0.0, NAN))
    splits = [500, 1, 20, 1, 7, 1]
    expected = clean.play(rows, splits)
    assert torch.isfinite(expected).all()
    assert agree([poisoned.play(rows, splits)], [expected], exactly=kernels == "plain")


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("undone", [1, 2, 3])
@pytest.mark.parametrize("splits", [[1] * 6, [2, 4], [6]])
@pytest.mark.parametrize("dtype", DTYPES)
def test_slack_lets_a_conversation_go_back(kernels: str, undone: int, splits: list[int], dtype: CacheDType) -> None:
    """Rows of undone tokens lie in slots that claim to be older than any window."""
    layer = Layer(kernels, window=8, rows=11, dtype=dtype)
    first, second = random_rows(21), random_rows(6, seed=1)
    layer.play(first, [13, 7, 1])
    layer.offset -= undone
    kept = first[: 21 - undone]
    got = layer.play(second, splits)
    torch.testing.assert_close(got, layer.oracle(torch.cat([kept, second]))[len(kept) :], **layer.tolerance)


@pytest.mark.parametrize("fill", [NAN, 1e3])
@pytest.mark.parametrize("kernel_size", [2, 3, 5])
@pytest.mark.parametrize("splits", [[1] * 9, [2, 1, 6], [9], [1, 8]])
def test_a_convolutions_state_before_the_first_token_reaches_no_output(
    fill: float, kernel_size: int, splits: list[int]
) -> None:
    torch.manual_seed(0)
    spec = ShortConvSpec(kernel_size=kernel_size, bias=True)
    conv = ShortConv(spec, 6, 1e-6, PlainKernels()).requires_grad_(False)
    rows = random_rows(9, 6)
    outputs, states = [], []
    for value in (0.0, fill):
        state, offset, parts = torch.full((1, kernel_size - 1, 6), value), 0, []
        for chunk in rows.split(splits):
            call = Call(len(chunk), offset, write_first=len(chunk) == 1, rotary={None: None})
            parts.append(conv(chunk[None], call, [state])[0])
            offset += len(chunk)
        outputs.append(torch.cat(parts))
        states.append(state)
    assert torch.equal(*outputs) and torch.equal(*states)
