"""The kernels of `native/` compiled for processors other than this one, without ExecuTorch: for older x86,
which it runs, and for ARM, in an emulator where it is none."""

from __future__ import annotations

import shutil
import signal
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from test_int8_kernels import Quantized, floats
from test_ring_kernels import SCALE, assert_attends, assert_is, assert_weighs, definition, tensors
from test_ring_kernels import multiplies_in_bfloat16 as in_bfloat16
from torch import Tensor

from exporter.backends.executorch import ring_kernels
from exporter.backends.executorch.ring_kernels import NATIVE, SOURCES

DRIVERS = Path(__file__).resolve().parents[1] / "native"
X86 = (
    "-march=x86-64", "-march=x86-64-v3", "-march=x86-64-v3 -mavxvnni", "-march=skylake-avx512", "-march=cooperlake",
)  # fmt: skip
# What every ARM of 64 bits has; products of int8 (phones since 2018); products of bfloat16 (since 2021).
ARM = ("-march=armv8-a", "-march=armv8.2-a+dotprod+fp16", "-march=armv8.6-a+bf16+i8mm")
ON_ARM = NATIVE.startswith("-mcpu")
KINDS = (torch.float32, torch.float16, torch.int8)


@dataclass(frozen=True)
class Target:
    compiler: tuple[str, ...]  # with the options that name the processor
    emulator: tuple[str, ...] = ()

    def build(self, binary: Path, *sources: Path) -> Path:
        options = ["-std=c++17", "-O3", "-Wall", "-Wextra", *(["-static"] if self.emulator else [])]
        command = [*self.compiler, *options, f"-I{SOURCES}", *map(str, sources), "-o", str(binary)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        if self.emulator:  # for x86 GCC warns of what its own headers leave undefined
            assert not done.stderr
        return binary

    def run(self, binary: Path, given: bytes = b"") -> bytes:
        done = subprocess.run([*self.emulator, str(binary)], input=given, capture_output=True, check=False)
        if done.returncode == -signal.SIGILL and not self.emulator:
            pytest.skip(f"this processor has no {' '.join(self.compiler[1:])}")
        assert done.returncode == 0, done.stderr
        return done.stdout


def targets() -> Iterator[object]:
    """With the compiler that `runtime_ref` uses, or the one for ARM, and with clang, which apps use."""
    names = ("clang++", *(f"clang++-{version}" for version in range(30, 13, -1)))
    clang = next(filter(None, map(shutil.which, names)), None)
    if not clang:
        yield pytest.param(None, id="clang", marks=pytest.mark.skip(reason="install clang"))
    for tool in dict.fromkeys(filter(None, (ring_kernels.compiler(), clang))):
        for options in ARM if ON_ARM else X86:
            yield pytest.param(Target((tool, *options.split())), id=f"{Path(tool).name}{options}")
    if ON_ARM:
        return
    cross = shutil.which("aarch64-linux-gnu-g++")
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    reason = "install a cross compiler and an emulator: g++-aarch64-linux-gnu, qemu-user-static"
    skip = pytest.mark.skipif(not (cross and emulator), reason=reason)
    for tools in ((cross or "",), *([(clang, "--target=aarch64-linux-gnu")] if clang else [])):
        for options in ARM:
            target = Target((*tools, options), (emulator or "",))
            yield pytest.param(target, id=f"{Path(tools[0]).name}-aarch64{options}", marks=skip)


@dataclass(frozen=True)
class Case:
    heads: tuple[int, int, int]  # of the query, of keys and values, head_dim
    query_len: int
    rows: int
    how: str  # "causal"; "whole": every query sees all rows; "masked"; "late": masked from all but the last rows

    def added(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.rows)
        if self.how == "whole":
            return torch.zeros(self.query_len, self.rows)
        if self.how == "causal":
            return torch.full((self.query_len, self.rows), -torch.inf).triu(1 + self.rows - self.query_len)
        if self.how == "late":  # so far below 0 that a part without a row must not count as one of scores 0
            return torch.full((self.query_len, self.rows), -100.0).index_fill(1, torch.arange(128), -torch.inf)
        visible = torch.rand(self.query_len, self.rows, generator=generator) < 0.3
        return torch.randn(self.query_len, self.rows, generator=generator).where(visible, torch.tensor(-torch.inf))


# One query and several; groups of 1 to 6; numbers that fill no vector; around tiles of queries and blocks of rows.
CASES = (
    Case((4, 1, 256), 1, 600, "causal"),
    Case((4, 1, 256), 1, 129, "masked"),
    Case((4, 1, 256), 13, 140, "causal"),
    Case((4, 1, 256), 40, 257, "masked"),
    Case((9, 3, 64), 1, 127, "causal"),
    Case((9, 3, 64), 49, 200, "causal"),
    Case((8, 2, 20), 1, 300, "masked"),
    Case((8, 2, 20), 97, 97, "causal"),
    Case((6, 1, 8), 1, 1, "causal"),
    Case((6, 1, 8), 200, 600, "masked"),
    Case((3, 3, 5), 1, 2, "causal"),
    Case((3, 3, 5), 2, 2, "causal"),
    Case((3, 3, 5), 25, 128, "whole"),
    Case((10, 2, 33), 1, 257, "causal"),
    Case((10, 2, 33), 12, 64, "masked"),
    Case((4, 2, 100), 1, 3, "masked"),
    Case((4, 2, 100), 1, 200, "late"),
    Case((4, 2, 100), 5, 200, "late"),
    Case((4, 2, 100), 7, 130, "whole"),
)


@dataclass(frozen=True)
class Given:
    """What a case is of a kind: its arguments as floats, what attention is of them, and the driver's bytes."""

    parts: tuple[Tensor, Tensor, Tensor]
    added: Tensor
    wanted: Tensor
    data: bytes


def integers(case: Case) -> Quantized:
    """All of int8 also -128, which the exporter's quantiser never makes."""
    generator, out = torch.Generator().manual_seed(case.rows), []
    for part in tensors(case.heads, case.query_len, case.rows, 0):
        out.append(torch.randint(-128, 128, part.shape, generator=generator).to(torch.int8))
        out.append(torch.rand((*part.shape[:-1], 1), generator=generator) * 0.013 + 0.003)
    return tuple(out)


@cache
def given(case: Case, kind: torch.dtype) -> Given:
    of_int8 = integers(case)
    parts = floats(of_int8) if kind == torch.int8 else tensors(case.heads, case.query_len, case.rows, 0, kind)
    added = case.added()
    # What no query sees is no number, and so are three rows after those that a causal chunk is given.
    hidden = torch.cat([~added.isfinite().any(0), torch.ones(3 * (case.how == "causal"), dtype=torch.bool)])
    arrays: list[Tensor] = []
    for place, part in enumerate(parts):
        own = [of_int8[2 * place].clone(), of_int8[2 * place + 1].clone()] if kind == torch.int8 else [part.clone()]
        if place:
            own = [torch.cat([one, one[:, :1].expand(-1, len(hidden) - case.rows, -1, -1)], 1) for one in own]
            own[-1][:, hidden] = torch.nan
        arrays += own
    masked = case.how in ("masked", "late")
    numbers = (case.query_len, len(hidden), *case.heads, case.rows - case.query_len, case.how == "causal", masked)
    header = struct.pack("=9qd", KINDS.index(kind), *numbers, SCALE)
    arrays += [added] if masked else []
    return Given(parts, added, definition(*parts, added), header + b"".join(one.numpy().tobytes() for one in arrays))


@pytest.fixture(scope="module", params=targets())
def target(request: pytest.FixtureRequest) -> Target:
    return request.param


@pytest.fixture(scope="module")
def driver(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    binary = tmp_path_factory.mktemp("driver") / "driver"
    return target.build(binary, SOURCES / "attention.cpp", DRIVERS / "attention_driver.cpp")


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_attention_is_the_definition(target: Target, driver: Path, kind: torch.dtype) -> None:
    done = target.run(driver, b"".join(given(case, kind).data for case in CASES))
    dtype = np.float16 if kind == torch.float16 else np.float32
    sizes = [given(case, kind).wanted.numel() for case in CASES]
    results = np.split(np.frombuffer(done, dtype).copy(), np.cumsum(sizes))
    assert results.pop().size == 0
    bfloat16 = in_bfloat16(*target.compiler)
    for case, flat in zip(CASES, results, strict=True):
        of = given(case, kind)
        got = torch.from_numpy(flat).reshape(of.wanted.shape)
        if not bfloat16 or case.query_len == 1 or kind == torch.float32:
            assert_is(got, of.wanted)
        elif kind == torch.float16:
            assert_attends(got, *of.parts, of.added, bfloat16=bfloat16)
        else:
            q, k, v = of.parts
            assert_weighs(got, of.wanted, definition(q, k, v.abs(), of.added))


def test_single_numbers_are_converted_as_vectors_are(target: Target, tmp_path: Path) -> None:
    assert target.run(target.build(tmp_path / "driver", DRIVERS / "half_driver.cpp")) == b"0"
