"""Memory as the process itself holds it."""

import gc
import mmap
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from exporter.machine import (
    NEW_OBJECTS,
    STACK_WORDS,
    collected_seldom,
    machine,
    on_one_piece_of_stack,
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


def test_collections_are_few_inside_only() -> None:
    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()

    def count(objects: int) -> int:
        """Of collections while that many objects are made that stay."""
        before = sum(generation["collections"] for generation in gc.get_stats())
        held = [[] for _ in range(objects)]
        assert len(held) == objects
        return sum(generation["collections"] for generation in gc.get_stats()) - before

    outside = count(5 * NEW_OBJECTS)
    with pytest.raises(KeyError), collected_seldom():
        assert gc.get_freeze_count() > frozen + 1_000, "what there was is left out"
        assert gc.get_threshold() == (NEW_OBJECTS, *thresholds[1:])
        assert count(5 * NEW_OBJECTS) <= 5 < outside
        raise KeyError
    assert gc.get_threshold() == thresholds and gc.get_freeze_count() == frozen


@pytest.mark.skipif(sys.platform != "linux", reason="counts pages as Linux does")
def test_no_depth_of_calls_fetches_memory_at_every_turn() -> None:
    """Of a loop of calls behind 0 to 199 others: of frames of some 20 words a piece of 16 KB ends among them, and what
    the loop calls takes more than one of these."""
    turns = 1_000

    def inner() -> None:
        pass

    inner.__code__ = inner.__code__.replace(co_stacksize=100)

    def faults(depth: int) -> int:
        if depth:
            return faults(depth - 1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(turns):
            inner()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    assert on_one_piece_of_stack(lambda: max(faults(depth) for depth in range(200))) < turns // 10
    assert on_one_piece_of_stack.__code__.co_stacksize == STACK_WORDS
    if sys.version_info < (3, 12):  # what it is for, as long as it is there
        assert max(faults(depth) for depth in range(200)) > turns // 2
