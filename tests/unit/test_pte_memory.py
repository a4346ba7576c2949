"""What a loaded `.pte` leaves in memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import re
import time
from pathlib import Path

import executorch
import pytest
import torch
from recipes import quantize_by
from tiny_models import GLOBAL, SLIDING, decoder_of, model
from torch.export import export

from exporter.backends.executorch.build import check_codes
from exporter.backends.executorch.file_pages import FilePages, nothing_locked
from exporter.backends.executorch.lower import lower
from exporter.backends.executorch.ring_kernels import loading
from exporter.backends.executorch.runtime import TOKENS_OF_PAGES, PteProgram, _loaded, one_torch_thread, prepare
from exporter.backends.executorch.xnnpack import BACKEND, WEIGHT_CACHE, BackendOption, share_packed_weights
from exporter.errors import UnsupportedModelError
from exporter.quantization.modules import QuantizedLinear
from exporter.spec import QuantizationSpec

GET_OPTION = "_ZN10executorch7runtime10get_optionEPKcNS0_4SpanINS0_13BackendOptionEEE"


def shares() -> bool:
    library = ctypes.CDLL(str(Path(next(iter(executorch.__path__))) / "lib" / "libexecutorch.so"))
    get_option = getattr(library, GET_OPTION)
    get_option.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t)
    option = BackendOption(key=WEIGHT_CACHE, index=1)
    assert get_option(BACKEND, ctypes.byref(option), 1) == 0
    assert option.index == 0  # a bool
    return bool(option.value[0])


class Scaled(torch.nn.Module):
    """The same integers in every instance, times `scale`."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        codes = torch.randint(-127, 128, (64, 32), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
        self.linear = QuantizedLinear(codes, torch.full((64,), scale), None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_the_first_program_shares_packed_weights_and_none_beside_it(tmp_path: Path) -> None:
    prepare()
    share_packed_weights(True)
    assert shares()
    share_packed_weights(False)
    assert not shares()
    gc.collect()
    assert not _loaded, "a program of another test is alive"
    x = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(1))
    programs, results = [], []
    for scale in (0.25, 0.5):
        path = tmp_path / f"{scale}.pte"
        lower({name: export(Scaled(scale), (x,)) for name in ("prefill", "main")}, path)
        programs.append(PteProgram(path))
        assert shares() == (scale == 0.25)
        method = programs[-1]._methods["main"]
        assert method is not None
        results.append(method.execute([x])[0].clone())
    assert torch.equal(results[1], 2 * results[0]) and float(results[0].abs().max()) > 0


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
        FilePages(path).release()
        assert resident_kilobytes(path) == 0 and resident_kilobytes(other) == 1024
        assert one[255] == 255 and one[-1] == 255


def test_what_was_read_of_a_program_is_let_go_every_so_many_tokens(tmp_path: Path) -> None:
    x, path = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(1)), tmp_path / "model.pte"
    lower({name: export(Scaled(0.25), (x,)) for name in ("prefill", "main")}, path)
    program = PteProgram(path)
    kilobytes = sum(size for _, size in program._pages.spans) // 1024
    assert kilobytes > 0 and resident_kilobytes(path) == 0
    for _ in range(2):
        read = [ctypes.string_at(start, size) for start, size in program._pages.spans]
        assert read[0][:256] in path.read_bytes() and resident_kilobytes(path) == kilobytes
        program._let_pages_go(TOKENS_OF_PAGES - 1)
        assert resident_kilobytes(path) == kilobytes
        program._let_pages_go(1)
        assert resident_kilobytes(path) == 0


def test_the_pages_of_a_file_are_let_go_as_long_as_it_is_loading(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * 4096)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        for _ in range(2):
            with loading(path):
                for _ in range(3):
                    assert mapped[255] == 255 and mapped[-1] == 255
                    deadline = time.monotonic() + 60
                    while resident_kilobytes(path) and time.monotonic() < deadline:
                        time.sleep(0.001)
                    assert resident_kilobytes(path) == 0
            assert mapped[:] == path.read_bytes()
            time.sleep(0.05)
            assert resident_kilobytes(path) == 1024  # nobody watches any more


def test_nothing_can_be_locked_while_a_program_is_loaded_and_as_much_as_before_afterwards() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    page = mmap.mmap(-1, mmap.PAGESIZE)
    address, size = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(page))), ctypes.c_size_t(mmap.PAGESIZE)
    before = libc.mlock(address, size)
    libc.munlock(address, size)
    for error in (None, ZeroDivisionError):
        with contextlib.suppress(ZeroDivisionError), nothing_locked():
            assert libc.mlock(address, size) != 0
            if error is not None:
                raise error
        assert libc.mlock(address, size) == before
        libc.munlock(address, size)


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


def test_equal_integers_with_different_scales_are_refused() -> None:
    decoder = decoder_of(model(SLIDING, GLOBAL), context=64)
    quantize_by(QuantizationSpec(linear="int8"), decoder)
    check_codes(decoder)
    first, second = (layer.feed_forward.gate_proj for layer in decoder.layers)
    second.weight = first.weight.clone()
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.feed_forward\.gate_proj and layers\.1"):
        check_codes(decoder)
    second.scales = first.scales.clone()
    check_codes(decoder)
    second.scales, first.weight = first.scales * 2, torch.zeros_like(first.weight)
    second.weight = first.weight
    check_codes(decoder)
