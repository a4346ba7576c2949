"""Memory as the process itself holds it."""

import subprocess
import sys

import pytest

from exporter.machine import machine, peak_memory_bytes, resident_bytes

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
