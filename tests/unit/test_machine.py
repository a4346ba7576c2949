"""Memory as the process itself holds it."""

import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from exporter.machine import (
    machine,
    peak_memory_bytes,
    resident_bytes,
    resident_parts,
)

PEAK = "import exporter.machine as m; print(m.peak_memory_bytes())"


def test_the_peak_stays_when_memory_is_given_back() -> None:
    before = resident_bytes()
    block = bytearray(200 << 20)
    block[:: 1 << 10] = b"x" * len(block[:: 1 << 10])
    held = resident_bytes()
    del block
    assert held >= before + (190 << 20)
    assert resident_bytes() < held - (150 << 20)
    assert peak_memory_bytes() >= held - (1 << 20)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell the parts")
def test_what_was_written_is_told_from_pages_of_files(tmp_path: Path) -> None:
    size, near = 64 << 20, 2 << 20
    (tmp_path / "file").write_bytes(b"x" * size)

    def parts() -> tuple[int, int]:
        found = resident_parts()
        assert found is not None and abs(found.anonymous + found.file - resident_bytes()) < near
        return found.anonymous, found.file

    def grew(before: tuple[int, int]) -> tuple[bool, bool]:
        now = parts()
        grown = [after - then for after, then in zip(now, before, strict=True)]
        assert all(abs(one) < near or abs(one - size) < near for one in grown), grown
        return grown[0] > near, grown[1] > near

    before = parts()
    with (tmp_path / "file").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) == size // mmap.PAGESIZE * ord("x")
        assert grew(before) == (False, True)
    before = parts()
    for flags in (mmap.MAP_PRIVATE, mmap.MAP_SHARED):
        with mmap.mmap(-1, size, flags=flags | mmap.MAP_ANONYMOUS) as written:
            written[:: mmap.PAGESIZE] = b"x" * (size // mmap.PAGESIZE)
            assert grew(before) == (True, False)


def test_systems_that_do_not_tell_have_no_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("exporter.machine._STATUS", tmp_path / "not there")
    assert resident_parts() is None and resident_bytes() == peak_memory_bytes() > 0


@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell no more than ru_maxrss")
def test_a_child_does_not_inherit_the_peak_of_its_parent() -> None:
    block = bytearray(400 << 20)
    block[:: 1 << 10] = b"x" * len(block[:: 1 << 10])
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    del block
    assert int(done.stdout) < 200 << 20


RETURNED = """
import exporter.machine as m, torch
{setting}
torch.ones(8_000_000)  # glibc raises its threshold by what is freed, up to 32 MB
blocks = [(torch.ones(5_000_000), torch.ones(1_000)) for _ in range(20)]  # 20 MB each, and what keeps the heap long
small, held = [pair[1] for pair in blocks], m.resident_bytes()
del blocks
print(held - m.resident_bytes())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_large_blocks_go_back_at_once() -> None:
    """20 of 20 MB, and not most of them without the setting: small blocks lie between."""

    def given_back(setting: str) -> int:
        code = RETURNED.format(setting=setting)
        return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)

    assert given_back("m.return_large_memory()") > 380 << 20
    assert given_back("") < 200 << 20


def test_the_machine_in_a_line() -> None:
    assert "GiB, Python 3." in machine() and "\n" not in machine()
