"""What a loaded `.pte` leaves in memory."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import executorch
import pytest
import torch

from runtime_ref.programs.file_pages import release_file_pages
from runtime_ref.programs.pte import one_torch_thread, prepare
from runtime_ref.programs.xnnpack import BACKEND, WEIGHT_CACHE, BackendOption

GET_OPTION = "_ZN10executorch7runtime10get_optionEPKcNS0_4SpanINS0_13BackendOptionEEE"


def test_xnnpack_shares_packed_weights_once_the_runtime_is_prepared() -> None:
    prepare()
    library = ctypes.CDLL(str(Path(next(iter(executorch.__path__))) / "lib" / "libexecutorch.so"))
    get_option = getattr(library, GET_OPTION)
    get_option.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t)
    option = BackendOption(key=WEIGHT_CACHE, index=1)
    assert get_option(BACKEND, ctypes.byref(option), 1) == 0
    assert (option.index, option.value[0]) == (0, 1)  # a bool, true


def resident_kilobytes(path: Path) -> int:
    areas = re.split(r"\n(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text())
    return sum(int(re.search(r"Rss: +(\d+)", area)[1]) for area in areas if str(path) in area)  # type: ignore[index]


def test_the_pages_of_a_file_are_let_go_and_can_be_read_again(tmp_path: Path) -> None:
    path, other = tmp_path / "weights", tmp_path / "other"
    for file in (path, other):
        file.write_bytes(bytes(range(256)) * 4096)
    with path.open("rb") as first, other.open("rb") as second:
        one = mmap.mmap(first.fileno(), 0, access=mmap.ACCESS_READ)
        two = mmap.mmap(second.fileno(), 0, access=mmap.ACCESS_READ)
        assert one[:] == two[:]
        assert resident_kilobytes(path) == resident_kilobytes(other) == 1024
        release_file_pages(path)
        assert resident_kilobytes(path) == 0 and resident_kilobytes(other) == 1024
        assert one[255] == 255 and one[-1] == 255


def test_torch_gets_its_threads_back_whatever_happens() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(ZeroDivisionError), one_torch_thread():
            assert torch.get_num_threads() == 1
            raise ZeroDivisionError
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
