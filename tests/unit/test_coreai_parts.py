"""What the Core AI back end is made of, where it can be tried without a model."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("coreai")

from exporter.backends.coreai.bytecode import stored_blobs
from exporter.backends.coreai.file import Function, Operation, TensorType
from exporter.backends.coreai.values import Values
from exporter.backends.coreai.weights import _half
from exporter.errors import BundleError, MissingPackageError, UnsupportedModelError
from exporter.graph.index_proof import NotPlayable
from exporter.optional import optional


def test_a_package_that_is_not_there_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "coreai_torch", None)
    with pytest.raises(MissingPackageError, match=r"ring-exporter\[coreai\]") as error:
        optional("coreai_torch", "coreai")
    assert error.value.exit_code == 2


def varint(value: int) -> bytes:
    """MLIR's: as many low zero bits before a one as bytes follow the first."""
    for more in range(8):
        if value < 1 << (7 * (more + 1)):
            return ((value << (more + 1)) | (1 << more)).to_bytes(more + 1, "little")
    return b"\0" + value.to_bytes(8, "little")


def section(number: int, data: bytes) -> bytes:
    return bytes([number]) + varint(len(data)) + data


def bytecode(blobs: list[bytes]) -> bytes:
    """A file with these resources and nothing else, each behind its alignment (1) and its length."""
    entries = [varint(1) + varint(len(blob)) + blob for blob in blobs]
    sizes = varint(0) + varint(7) + varint(len(entries))
    sizes += b"".join(varint(i) + varint(len(entry)) + b"\0" for i, entry in enumerate(entries))
    return b"ML\xefR" + varint(6) + b"test\0" + section(6, sizes) + section(5, b"".join(entries))


def test_blobs_are_found_and_a_transposed_one_is_known_again(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    table = rng.standard_normal((64, 48), dtype=np.float32)
    other = rng.standard_normal((64, 48), dtype=np.float32)
    small = np.ones(3, dtype=np.float32)
    contents = [table.tobytes(), other.tobytes(), small.tobytes(), table.T.tobytes(), small.tobytes()]
    (tmp_path / "main.mlirb").write_bytes(bytecode(contents))
    stored = stored_blobs(tmp_path / "main.mlirb")
    assert [blob.size for blob in stored.blobs] == [len(content) for content in contents]
    data = (tmp_path / "main.mlirb").read_bytes()
    assert [data[blob.offset : blob.offset + blob.size] for blob in stored.blobs] == contents
    assert stored.repeated == (stored.blobs[3],)  # the small ones may well be equal
    assert (stored.file_bytes, stored.blob_bytes) == (len(data), sum(map(len, contents)))


@pytest.mark.parametrize("cut", [0, 3, 40, 200])
def test_bytecode_that_ends_early_is_refused(cut: int, tmp_path: Path) -> None:
    (tmp_path / "main.mlirb").write_bytes(bytecode([bytes(5000)])[:cut])
    with pytest.raises(BundleError, match=r"main\.mlirb"):
        stored_blobs(tmp_path / "main.mlirb")


def test_a_weight_beyond_float16_is_refused() -> None:
    assert _half(torch.tensor([65504.0, -1e-9])).tolist() == [65504.0, 0.0]
    with pytest.raises(UnsupportedModelError, match="65504"):
        _half(torch.tensor([7e4]))


@pytest.mark.parametrize(
    ("shape", "element", "size"), [((3, 5), "si4", 8), ((2, 2), "f32", 16), ((7,), "f16", 14), ((2, None), "f32", 0)]
)
def test_bytes_of_a_tensor(shape: tuple[int | None, ...], element: str, size: int) -> None:
    assert TensorType(shape, element).bytes == size


def test_integers_are_computed_from_shapes_and_never_from_content() -> None:
    """``(S - 3) mod 8`` from the shape of argument 0, and the content of argument 0."""
    scalar, pair = TensorType((1,), "si32"), TensorType((2,), "si32")
    constants = {2: np.array([1]), 3: np.array([2]), 4: np.array([1]), 5: np.array([3]), 6: np.array([8])}
    operations = [Operation("coreai.constant", (), (value,), constant) for value, constant in constants.items()]
    operations += [
        Operation("coreai.get_shape", (0,), (1,)),
        Operation("coreai.slice", (1, 2, 3, 4), (7,)),
        Operation("coreai.decomposable.broadcasting_sub", (7, 5), (8,)),
        Operation("coreai.decomposable.broadcasting_modulo", (8, 6), (9,)),
        Operation("coreai.decomposable.broadcasting_add", (0, 9), (10,)),
    ]
    types = {value: scalar for value in range(2, 11)} | {0: TensorType((1, None), "si32"), 1: pair}
    function = Function("main", (), (), (), tuple(operations), types)
    values = Values(function, {})
    values.shapes[0] = (1, 24)
    assert values(9).tolist() == [5]
    with pytest.raises(NotPlayable, match="content of an input"):
        values(10)
