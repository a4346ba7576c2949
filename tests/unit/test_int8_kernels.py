"""``llama::custom_quantized_sdpa`` by the kernels of `native/` and by ExecuTorch's."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from executorch.exir import to_edge
from executorch.runtime import Runtime, Verification
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import int8_rows
from test_ring_kernels import (
    BOUND,
    HEADS,
    QUERIES,
    ROWS,
    SCALE,
    assert_weighs,
    definition,
    multiplies_in_bfloat16,
    tensors,
)
from torch import Tensor
from torch.export import Dim, export

from exporter.backends.executorch import runtime as pte
from exporter.backends.executorch.ring_kernels import use_ring_kernels

pte.prepare()
STOCK_BOUND = 1e-5  # ExecuTorch's kernel adds up all rows in one go; 4.1e-6 was seen
Quantized = tuple[Tensor, ...]
"""Query, keys and values as integers, each followed by its scales."""


class Attention(torch.nn.Module):
    """Causal over as many rows as the last argument is long, or under a mask."""

    def __init__(self, masked: bool, zero_point: int) -> None:
        super().__init__()
        self.masked, self.zero_point = masked, zero_point

    def forward(  # noqa: PLR0917  as the operator has them
        self, q: Tensor, q_scales: Tensor, k: Tensor, k_scales: Tensor, v: Tensor, v_scales: Tensor,
        last: Tensor,
    ) -> Tensor:  # fmt: skip
        options = (0, last, 0.0, False, SCALE) if self.masked else (last.shape[0] - 1, None, 0.0, True, SCALE)
        zeros = [torch.full_like(one, self.zero_point, dtype=torch.int8) for one in (q_scales, k_scales, v_scales)]
        return torch.ops.llama.custom_quantized_sdpa(
            q, k, v, *options, zeros[0], q_scales, zeros[1], k_scales, zeros[2], v_scales
        )


def quantized(parts: tuple[Tensor, Tensor, Tensor]) -> Quantized:
    return tuple(tensor for part in parts for tensor in int8_rows(part))


def floats(given: Quantized) -> tuple[Tensor, Tensor, Tensor]:
    q, q_scales, k, k_scales, v, v_scales = given
    return q * q_scales, k * k_scales, v * v_scales


def assert_attends(got: Tensor, given: Quantized, added: Tensor, ring: bool = True) -> None:
    """Integers are exact in bfloat16; the weights of a chunk are not."""
    q, k, v = floats(given)
    wanted = definition(q, k, v, added)
    if ring and q.shape[1] > 1 and multiplies_in_bfloat16():
        assert_weighs(got, wanted, definition(q, k, v.abs(), added))
    else:
        torch.testing.assert_close(got, wanted, rtol=0, atol=BOUND if ring else STOCK_BOUND)


@cache
def program(heads: tuple[int, int, int], single: bool, masked: bool, zero_point: int) -> bytes:
    by_query = {} if single else {1: Dim("query_len", min=2, max=200)}
    by_row = {1: Dim("rows", min=2, max=600)}
    example = quantized(tensors(heads, 1 if single else 7, 300, 0))
    query_len = example[0].shape[1]
    last = torch.zeros(query_len, 300) if masked else torch.zeros(9)
    by_last = {0: Dim("before", min=2, max=601)}
    if masked:
        by_last = {1: by_row[1]} if single else {0: by_query[1], 1: by_row[1]}
    shapes = [by_query, by_query, *[by_row] * 4, by_last]
    traced = export(Attention(masked, zero_point), (*example, last), dynamic_shapes=shapes, strict=False)
    return to_edge(traced).to_executorch().buffer


@cache
def method(heads: tuple[int, int, int], single: bool, masked: bool, zero_point: int, ring: bool):  # type: ignore[no-untyped-def]
    assert use_ring_kernels(ring) == ring
    data = program(heads, single, masked, zero_point)
    return Runtime.get().load_program(data, verification=Verification.Minimal).load_method("forward")


def run(given: Quantized, last: Tensor, ring: bool = True, zero_point: int = 0) -> Tensor:
    heads = (given[0].shape[2], given[2].shape[2], given[0].shape[3])
    loaded = method(heads, given[0].shape[1] == 1, last.dim() == 2, zero_point, ring)
    return loaded.execute([*given, last])[0].clone()


@settings(max_examples=100, deadline=None)
@given(
    heads=st.sampled_from(HEADS), query_len=QUERIES, rows=ROWS, spare=st.integers(0, 9), seed=st.integers(0, 9),
    ring=st.booleans(),
)  # fmt: skip
def test_causal_attention_is_the_definition_and_reads_no_later_row(
    *, heads: tuple[int, int, int], query_len: int, rows: int, spare: int, seed: int, ring: bool
) -> None:
    rows = max(rows, query_len + 1)
    start = rows - query_len
    given = quantized(tensors(heads, query_len, rows + spare, seed))
    added = torch.full((query_len, rows + spare), -torch.inf)
    for i in range(query_len):
        added[i, : start + i + 1] = 0.0
    clean = tuple(one.clone() for one in given)
    for place in (2, 4):
        given[place][:, rows:], given[place + 1][:, rows:] = -128, torch.nan
    assert_attends(run(given, torch.zeros(start + 1), ring), clean, added, ring)


@settings(max_examples=100, deadline=None)
@given(
    heads=st.sampled_from(HEADS), sizes=st.tuples(QUERIES, ROWS), share=st.sampled_from((0.02, 0.5, 1.0)),
    hidden=st.sampled_from((-torch.inf, torch.finfo(torch.float32).min / 2)), seed=st.integers(0, 9),
    ring=st.booleans(),
)  # fmt: skip
def test_masked_attention_is_the_definition_and_ours_reads_no_row_that_all_are_denied(
    *, heads: tuple[int, int, int], sizes: tuple[int, int], share: float, hidden: float, seed: int, ring: bool
) -> None:
    query_len, rows = sizes
    given = quantized(tensors(heads, query_len, rows, seed))
    generator = torch.Generator().manual_seed(seed)
    visible = torch.rand(query_len, rows, generator=generator) < share
    visible[torch.arange(query_len), torch.randint(rows, (query_len,), generator=generator)] = True  # one at least
    added = torch.randn(query_len, rows, generator=generator) * (seed % 2)  # a mask may weigh as well
    clean = tuple(one.clone() for one in given)
    if ring:
        for place in (3, 5):
            given[place][:, ~visible.any(0)] = torch.nan
    got = run(given, torch.where(visible, added, hidden), ring)
    assert_attends(got, clean, torch.where(visible, added, -torch.inf), ring)


@pytest.mark.parametrize("query_len", [1, 5])
def test_a_query_that_sees_nothing_gets_zeros(query_len: int) -> None:
    mask = torch.zeros(query_len, 40)
    mask[query_len // 2] = -torch.inf
    got = run(quantized(tensors(HEADS[1], query_len, 40, 0)), mask)
    assert torch.equal(got[:, query_len // 2], torch.zeros_like(got[:, 0]))
    assert bool(got.isfinite().all()) and (query_len == 1 or float(got[:, 0].abs().max()) > 0)


@pytest.mark.parametrize("query_len", [1, 5])
def test_the_largest_integers_of_either_sign_are_multiplied_exactly(query_len: int) -> None:
    """Also -128, which the exporter's quantiser never makes but another's may."""
    for query, key in ((127, 127), (-127, 127), (127, -128), (-128, -128)):
        q, k = torch.full((1, query_len, 4, 256), query), torch.full((1, 40, 1, 256), key)
        k[:, 20:] += 1
        v = torch.randint(-127, 128, k.shape, generator=torch.Generator().manual_seed(0))
        scales = [torch.full((*one.shape[:-1], 1), size) for one, size in ((q, 1e-3), (k, 2e-3), (v, 1e-2))]
        parts = [one.to(torch.int8) for one in (q, k, v)]
        given = tuple(tensor for pair in zip(parts, scales, strict=True) for tensor in pair)
        added = torch.zeros(query_len, 40)
        got, (q, k, v) = run(given, added), floats(given)
        if query_len > 1 and multiplies_in_bfloat16():
            assert_weighs(got, definition(q, k, v, added), definition(q, k, v.abs(), added))
        else:
            torch.testing.assert_close(got, definition(q, k, v, added), rtol=0, atol=2e-5)


@pytest.mark.parametrize("query_len", [1, 4])
def test_zero_points_other_than_zero_go_to_executorchs_own(query_len: int) -> None:
    """A mask gives row 20 to no query: theirs computes it all the same, ours does not."""
    given = quantized(tensors(HEADS[1], query_len, 30, 0))
    mask = torch.zeros(query_len, 30)
    ours, stock = (run(given, mask, ring, zero_point=3) for ring in (True, False))
    assert torch.equal(ours, stock) and float((ours - run(given, mask)).abs().max()) > 1e-2
    mask[:, 20] = -torch.inf
    given[3][:, 20] = given[5][:, 20] = torch.nan
    assert bool(run(given, mask).isfinite().all()) and not bool(run(given, mask, ring=False).isfinite().all())


def test_the_number_of_threads_changes_no_bit() -> None:
    from executorch.extension.pybindings import portable_lib

    before, results = portable_lib._threadpool_get_thread_count(), []
    try:
        for threads in (1, 2):
            portable_lib._unsafe_reset_threadpool(threads)
            for query_len in (1, 40):
                given = quantized(tensors(HEADS[1], query_len, 300, 3))
                results.append(run(given, torch.zeros(300 - query_len + 1)))
    finally:
        portable_lib._unsafe_reset_threadpool(before)
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])
