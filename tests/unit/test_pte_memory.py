"""What a loaded `.pte` leaves in memory."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import executorch
import pytest
import torch
from executorch.runtime import Program as ExecuTorchProgram
from recipes import quantize_by
from tiny_models import GLOBAL, SLIDING, decoder_of, model
from torch.export import export

from exporter.backends.executorch.build import check_codes
from exporter.backends.executorch.lower import lower
from exporter.backends.executorch.ring_kernels import executorch_root
from exporter.backends.executorch.runtime import PteProgram, _loaded, one_torch_thread, prepare
from exporter.errors import UnsupportedModelError
from exporter.quantization.modules import QuantizedLinear
from exporter.spec import QuantizationSpec
from exporter.tricks.packed_weights import BACKEND, WEIGHT_CACHE, BackendOption, packed_weights

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


def test_the_first_program_shares_packed_weights_and_none_beside_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prepare()
    with packed_weights(executorch_root() / "lib"):
        assert shares()
    assert not shares()
    gc.collect()
    assert not _loaded, "a program of another test is alive"
    while_loading: list[bool] = []
    load = ExecuTorchProgram.load_method

    def watched(self: ExecuTorchProgram, name: str) -> Any:
        while_loading.append(shares())
        return load(self, name)

    monkeypatch.setattr(ExecuTorchProgram, "load_method", watched)
    x = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(1))
    programs, results = [], []
    for scale in (0.25, 0.5):
        path = tmp_path / f"{scale}.pte"
        lower({name: export(Scaled(scale), (x,)) for name in ("prefill", "main")}, path)
        programs.append(PteProgram(path))
        assert while_loading[-2:] == [scale == 0.25] * 2 and not shares()
        method = programs[-1]._methods["main"]
        assert method is not None
        results.append(method.execute([x])[0].clone())
    assert torch.equal(results[1], 2 * results[0]) and float(results[0].abs().max()) > 0


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
