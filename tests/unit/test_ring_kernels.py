"""The kernels of `native/` inside a `.pte`, against the definition of attention in float64."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path

import executorch
import pytest
import torch
from executorch.exir import to_edge
from executorch.runtime import Runtime, Verification
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.export import Dim, export

from exporter.backends.executorch import ring_kernels
from exporter.backends.executorch import runtime as pte
from exporter.backends.executorch.ring_kernels import SOURCES, use_ring_kernels

pte.prepare()
SCALE = 0.1
BOUND = 4e-6  # of values of about 1
HALF = 2**-11  # float16 rounds a result by as much of itself
DTYPES = st.sampled_from((torch.float32, torch.float16))
# Query heads, heads of keys and values, head_dim: one KV head and many, groups of 1 to 6, lengths that fill no vector.
HEADS = ((4, 1, 256), (9, 3, 64), (8, 2, 20), (6, 1, 8), (3, 3, 5))


class Causal(torch.nn.Module):
    def forward(self, query: Tensor, keys: Tensor, values: Tensor, before: Tensor) -> Tensor:
        return torch.ops.llama.custom_sdpa(query, keys, values, before.shape[0] - 1, None, 0.0, True, SCALE)


class Masked(torch.nn.Module):
    def forward(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        return torch.ops.llama.custom_sdpa(query, keys, values, 0, mask, 0.0, False, SCALE)


@cache
def program(kind: str, heads: tuple[int, int, int], single: bool, dtype: torch.dtype = torch.float32) -> bytes:
    num_heads, num_kv_heads, head_dim = heads
    query_len, rows = Dim("query_len", min=2, max=200), Dim("rows", min=2, max=600)
    query = torch.zeros(1, 1 if single else 7, num_heads, head_dim, dtype=dtype)
    keys, values = (torch.zeros(1, 300, num_kv_heads, head_dim, dtype=dtype) for _ in range(2))
    by_query = {} if single else {1: query_len}
    shapes = [by_query, {1: rows}, {1: rows}]
    if kind == "causal":
        arguments = (query, keys, values, torch.zeros(9))
        shapes.append({0: Dim("before", min=2, max=601)})
        traced = export(Causal(), arguments, dynamic_shapes=shapes, strict=False)
    else:
        mask = torch.zeros(query.shape[1], 300)
        shapes.append({1: rows} if single else {0: query_len, 1: rows})
        traced = export(Masked(), (query, keys, values, mask), dynamic_shapes=shapes, strict=False)
    return to_edge(traced).to_executorch().buffer


@cache
def method(kind: str, heads: tuple[int, int, int], single: bool, ring: bool, dtype: torch.dtype = torch.float32):  # type: ignore[no-untyped-def]
    assert use_ring_kernels(ring) == ring
    loaded = Runtime.get().load_program(program(kind, heads, single, dtype), verification=Verification.Minimal)
    return loaded.load_method("forward")


def run(kind: str, tensors: tuple[Tensor, ...], ring: bool = True) -> Tensor:
    query, keys = tensors[:2]
    heads = (query.shape[2], keys.shape[2], query.shape[3])
    loaded = method(kind, heads, query.shape[1] == 1, ring, query.dtype)
    return loaded.execute(list(tensors))[0].clone()


def definition(query: Tensor, keys: Tensor, values: Tensor, added: Tensor) -> Tensor:
    """Head by head and query by query, over the rows that are not minus infinity."""
    return attended(query.double() * SCALE, keys.double(), values.double(), added)


def attended(query: Tensor, keys: Tensor, values: Tensor, added: Tensor) -> Tensor:
    """`definition` of queries that were multiplied by the scale."""
    out = torch.zeros(query.shape)
    group = query.shape[2] // keys.shape[2]
    for h in range(query.shape[2]):
        for q in range(query.shape[1]):
            seen = torch.isfinite(added[q])
            scores = keys[0, seen, h // group] @ query[0, q, h] + added[q, seen].double()
            out[0, q, h] = torch.softmax(scores, 0) @ values[0, seen, h // group]
    return out


@cache
def multiplies_in_bfloat16(*command: str) -> bool:
    """Whether chunks over float16 and int8 rows are multiplied in bfloat16 by what a compiler makes with its options,
    or by what `runtime_ref` makes here."""
    tool = ring_kernels.compiler()
    assert tool is not None
    macros = [*(command or (tool, ring_kernels.NATIVE)), "-dM", "-E", "-x", "c++", "/dev/null"]
    known = subprocess.run(macros, capture_output=True, text=True, check=True).stdout
    return "__AVX512BF16__" in known or "__ARM_FEATURE_BF16_VECTOR_ARITHMETIC" in known


def assert_attends(
    got: Tensor, query: Tensor, keys: Tensor, values: Tensor, added: Tensor, *, bfloat16: bool | None = None
) -> None:
    """`got` is what attention should be: in float32, or of operands that were rounded to bfloat16, the queries with the
    scale and the logarithm's base in them."""
    if bfloat16 is None:
        bfloat16 = multiplies_in_bfloat16()
    if got.dtype == torch.float32 or query.shape[1] == 1 or not bfloat16:
        return assert_is(got, definition(query, keys, values, added))
    factor = torch.tensor(SCALE) * torch.tensor(1.44269504)
    rounded = (query.float() * factor).bfloat16().double() / 1.44269504
    k, v = keys.bfloat16().double(), values.bfloat16().double()
    wanted, spread = attended(rounded, k, v, added), attended(rounded, k, v.abs(), added)
    assert_weighs(got, wanted, spread)
    # The mean error of so many roundings is far below its bound.
    assert float(((got.float() - wanted).abs() / (BOUND + spread)).mean()) < 2**-9
    return None


def assert_weighs(got: Tensor, wanted: Tensor, spread: Tensor) -> None:
    """`got` is `wanted` but for weights rounded to bfloat16: half a unit in the last place of eight bits, 2^-8 of each
    weight, and of `spread`, what they weigh were it all of one sign."""
    error = (got.float() - wanted).abs()
    rounding = HALF * wanted.abs() if got.dtype == torch.float16 else 0.0
    assert bool((error <= BOUND + rounding + 2**-8 * spread).all()), float(error.max())


def tensors(
    heads: tuple[int, int, int], query_len: int, rows: int, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads, head_dim = heads
    return (
        torch.randn(1, query_len, num_heads, head_dim, generator=generator).to(dtype),
        torch.randn(1, rows, num_kv_heads, head_dim, generator=generator).to(dtype),
        torch.randn(1, rows, num_kv_heads, head_dim, generator=generator).to(dtype),
    )


def assert_is(got: Tensor, wanted: Tensor) -> None:
    """`wanted`, in float32, is what `got` should be before it was rounded to its dtype."""
    rtol = HALF if got.dtype == torch.float16 else 0.0
    torch.testing.assert_close(got.float(), wanted, rtol=rtol, atol=BOUND)


# Around one and two tiles of queries, a part of rows for one query, a block of rows for several.
QUERIES = st.one_of(st.sampled_from((1, 1, 12, 13, 25, 49, 97)), st.integers(1, 60))
ROWS = st.one_of(st.sampled_from((127, 128, 129, 257)), st.integers(2, 300))


@settings(max_examples=80, deadline=None)
@given(
    heads=st.sampled_from(HEADS), query_len=QUERIES, rows=ROWS, spare=st.integers(0, 9), seed=st.integers(0, 9),
    dtype=DTYPES,
)  # fmt: skip
def test_causal_attention_is_the_definition_and_reads_no_later_row(
    *, heads: tuple[int, int, int], query_len: int, rows: int, spare: int, seed: int, dtype: torch.dtype
) -> None:
    rows = max(rows, query_len + 1)
    start = rows - query_len
    query, keys, values = tensors(heads, query_len, rows + spare, seed, dtype)
    keys[:, rows:], values[:, rows:] = torch.nan, torch.inf
    added = torch.full((query_len, keys.shape[1]), -torch.inf)
    for i in range(query_len):
        added[i, : start + i + 1] = 0.0
    got = run("causal", (query, keys, values, torch.zeros(start + 1)))
    assert_attends(got, query, keys, values, added)


@settings(max_examples=80, deadline=None)
@given(
    heads=st.sampled_from(HEADS), sizes=st.tuples(QUERIES, ROWS), share=st.sampled_from((0.02, 0.5, 1.0)),
    hidden=st.sampled_from((-torch.inf, torch.finfo(torch.float32).min / 2)), seed=st.integers(0, 9), dtype=DTYPES,
)  # fmt: skip
def test_masked_attention_is_the_definition_and_reads_no_row_that_all_are_denied(
    *, heads: tuple[int, int, int], sizes: tuple[int, int], share: float, hidden: float, seed: int, dtype: torch.dtype
) -> None:
    query_len, rows = sizes
    query, keys, values = tensors(heads, query_len, rows, seed, dtype)
    generator = torch.Generator().manual_seed(seed)
    visible = torch.rand(query_len, rows, generator=generator) < share
    visible[torch.arange(query_len), torch.randint(rows, (query_len,), generator=generator)] = True  # one at least
    added = torch.randn(query_len, rows, generator=generator) * (seed % 2)  # a mask may weigh as well
    denied = ~visible.any(0)
    keys[:, denied], values[:, denied] = torch.nan, torch.inf
    got = run("masked", (query, keys, values, torch.where(visible, added, hidden)))
    assert_attends(got, query, keys, values, torch.where(visible, added, -torch.inf))


@pytest.mark.parametrize("query_len", [1, 5])
def test_a_query_that_sees_nothing_gets_zeros(query_len: int) -> None:
    query, keys, values = tensors(HEADS[1], query_len, 40, 0)
    mask = torch.zeros(query_len, 40)
    mask[query_len // 2] = -torch.inf
    got = run("masked", (query, keys, values, mask))
    assert torch.equal(got[:, query_len // 2], torch.zeros_like(got[:, 0]))
    assert bool(got.isfinite().all()) and (query_len == 1 or float(got[:, 0].abs().max()) > 0)


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    query, keys, values = tensors(HEADS[0], 13, 200, 0)
    added = torch.zeros(13, 200)
    for scale in (1e-3, 40.0):
        wanted = definition(query * scale, keys, values, added)
        got = run("masked", (query * scale, keys, values, added))
        torch.testing.assert_close(got, wanted, rtol=0, atol=2e-4)  # scores of hundreds, to 2e-5


def test_the_number_of_threads_changes_no_bit() -> None:
    from executorch.extension.pybindings import portable_lib

    before = portable_lib._threadpool_get_thread_count()
    results = []
    try:
        for threads in (1, 2):
            portable_lib._unsafe_reset_threadpool(threads)
            for query_len in (1, 40):
                query, keys, values = tensors(HEADS[1], query_len, 300, 3)
                results.append(run("causal", (query, keys, values, torch.zeros(300 - query_len + 1))))
    finally:
        portable_lib._unsafe_reset_threadpool(before)
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])


def test_what_these_kernels_do_not_take_goes_to_executorchs_own() -> None:
    arguments = (*tensors(HEADS[1], 4, 30, 0, torch.bfloat16), torch.zeros(27))
    ours, stock = run("causal", arguments), run("causal", arguments, ring=False)
    assert ours.dtype == torch.bfloat16 and torch.equal(ours, stock) and float(ours.abs().max()) > 0


def test_the_two_kernels_are_different_ones_with_the_same_results() -> None:
    """A switch that switched nothing would pass every other test here."""
    query, keys, values = tensors(HEADS[1], 40, 300, 5)
    arguments = (query, keys, values, torch.zeros(261))
    halves = (*(t.half() for t in arguments[:3]), arguments[3])
    torch.testing.assert_close(run("causal", halves), run("causal", halves, ring=False), rtol=4 * HALF, atol=4 * HALF)
    ours, stock = run("causal", arguments), run("causal", arguments, ring=False)
    torch.testing.assert_close(ours, stock, rtol=0, atol=2e-6)
    keys[:, 280:] = torch.nan  # row 280 is hidden from the first twenty queries: only they survive, in either
    mask = torch.zeros(40, 300)
    mask[:, 280:] = -torch.inf
    assert bool(run("masked", (query, keys, values, mask)).isfinite().all())
    assert not bool(run("masked", (query, keys, values, mask), ring=False).isfinite().all())


class Converted(torch.nn.Module):
    def __init__(self, to: torch.dtype) -> None:
        super().__init__()
        self.to_dtype = to

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.to_dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_conversions_between_float16_and_float32_round_to_the_nearest(dtype: torch.dtype) -> None:
    """All float16s; floats around every boundary between two of them, and beyond the largest."""
    every = torch.arange(2**16).to(torch.uint16).view(torch.float16)
    if dtype == torch.float16:
        bits = every.float()[every.isfinite()].view(torch.int32)
        middle = (bits + 0x1000).view(torch.float32)
        near = torch.cat([middle, (bits + 0xFFF).view(torch.float32), (bits + 0x1001).view(torch.float32)])
        odd = torch.tensor([65519.9, 65520.0, 1e30, torch.inf, -torch.inf, torch.nan, 1e-8, 2.9e-8, -3e-8, 0.0])
        given = torch.cat([near, odd])
    else:
        given = every
    for count in (len(given), 37):  # the vectors of many threads, and what fills none
        x = given[-count:]
        dynamic = ({0: Dim("count", min=2, max=2**18)},)
        traced = export(Converted(dtype), (x,), dynamic_shapes=dynamic, strict=False)
        data = to_edge(traced).to_executorch().buffer
        results = []
        for ring in (True, False):
            assert use_ring_kernels(ring) == ring
            loaded = Runtime.get().load_program(data, verification=Verification.Minimal).load_method("forward")
            assert loaded is not None
            results.append(loaded.execute([x])[0].clone())
        for result in results:
            torch.testing.assert_close(result, x.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_without_a_compiler_programs_attend_with_executorchs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_kernels, "compiler", lambda: None)
    assert ring_kernels.build.__wrapped__() is None
    monkeypatch.setattr(ring_kernels, "_load", lambda: None)
    assert use_ring_kernels(True) is False


def test_a_compiler_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ring_kernels, "CACHE_DIR", tmp_path / "kernels")
    monkeypatch.setattr(ring_kernels, "FLAGS", ("-no-such-flag",))
    assert ring_kernels.build.__wrapped__() is None
    assert list((tmp_path / "kernels").iterdir()) == []


def test_the_library_is_built_once_and_again_when_what_it_depends_on_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ring_kernels, "CACHE_DIR", tmp_path)
    first = ring_kernels.build.__wrapped__()
    assert first is not None and [first] == list(tmp_path.iterdir())
    written = first.stat().st_mtime_ns
    assert ring_kernels.build.__wrapped__() == first and first.stat().st_mtime_ns == written
    monkeypatch.setattr(ring_kernels, "FLAGS", (*ring_kernels.FLAGS, "-DNDEBUG"))
    assert ring_kernels.build.__wrapped__() not in (None, first)


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
def test_an_app_builds_them_with_cmake(tmp_path: Path) -> None:
    """Against the package in ExecuTorch's wheel."""
    app = tmp_path / "app"
    app.mkdir()
    (app / "main.cpp").write_text(
        '#include <ring_kernels.h>\n#include <cstdio>\nint main() { std::printf("%d\\n", ring_use_kernels(1)); }\n'
    )
    root = Path(next(iter(executorch.__path__)))
    (app / "CMakeLists.txt").write_text(
        f"cmake_minimum_required(VERSION 3.24)\nproject(app CXX)\nadd_subdirectory({SOURCES} ring)\n"
        "add_executable(app main.cpp)\ntarget_link_libraries(app PRIVATE ring_kernels)\n"
    )
    build = tmp_path / "build"
    for command in (
        ["cmake", "-S", str(app), "-B", str(build), f"-Dexecutorch_DIR={root / 'share' / 'cmake'}"],
        ["cmake", "--build", str(build)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert subprocess.run([build / "app"], capture_output=True, text=True, check=True).stdout == "1\n"
