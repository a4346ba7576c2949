"""Room for what native libraries write: said before they end badly, and in Python's words when they do."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import LLAMA, write_checkpoint, write_config

from exporter import pipeline
from exporter.backends import runtime_module
from exporter.config import load_config
from exporter.errors import BundleError
from exporter.progress import Progress
from exporter.room import MARGIN, native_writing, require_room


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_room_is_for_the_weights_and_a_margin(tmp_path: Path) -> None:
    with largest_file(MARGIN + 1050):
        require_room(tmp_path, 1000, copies=3)
        with pytest.raises(OSError, match=rf"{tmp_path}") as caught:
            require_room(tmp_path, 1001)
    assert caught.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_copies_are_there_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """On a disk that has room for one file and a half."""
    free, real = [3 * MARGIN // 2], os.fstat

    def allocate(descriptor: int, offset: int, size: int) -> None:
        assert real(descriptor).st_size == 0
        free[0] -= size
        if free[0] < 0:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    require_room(tmp_path, 1000)
    free[0] = 3 * MARGIN // 2
    with pytest.raises(OSError, match=rf"{tmp_path}") as caught:
        require_room(tmp_path, 1000, copies=2)
    assert caught.value.errno == number
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_cannot_say_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unknown)
    require_room(tmp_path, 2**60)


FULL = [("/tmp/a", "/out/a", f"[Errno {errno.ENOSPC}] No space left on device: '/tmp/a' -> '/out/a'")]


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (shutil.Error(FULL), errno.ENOSPC),
        (shutil.Error([("/tmp/a", "/out/a", "something else")]), errno.EIO),
        (RuntimeError("[MIL FileWriter]: Unknown error occurred while writing data to the file."), errno.EIO),
    ],
)
def test_what_coremltools_says_of_a_full_disk(tmp_path: Path, error: Exception, number: int) -> None:
    before = tempfile.gettempdir()
    with pytest.raises(OSError, match=r"Errno|FileWriter|something else") as caught, native_writing(tmp_path):
        Path(tempfile.mkdtemp(), "left").write_bytes(b"half")
        assert [path.name[:10] for path in tmp_path.iterdir()] == [".temporary"]
        raise error
    assert (caught.value.errno, caught.value.filename) == (number, str(tmp_path))
    assert tempfile.gettempdir() == before
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_writing_error_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the model is wrong"), native_writing(tmp_path):
        raise RuntimeError("the model is wrong")


@pytest.mark.parametrize("target", ["coreml", "coreai"])
def test_a_program_too_large_for_its_place_ends_in_one_error(tmp_path: Path, target: str) -> None:
    pytest.importorskip({"coreml": "coremltools", "coreai": "coreai"}[target])
    checkpoint = write_checkpoint(tmp_path / "checkpoint", LLAMA | {"num_hidden_layers": 1})
    config = write_config(tmp_path / "c.yaml", checkpoint, targets=[target])
    place = tmp_path / "place"
    place.mkdir()
    with largest_file(50_000), pytest.raises(BundleError, match="File too large; expected a directory"):
        pipeline.export(load_config(config), place / "out", Progress.silent())
    assert list(place.iterdir()) == []


def test_no_room_to_unpack_a_core_ai_program_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("coreai")
    asset = tmp_path / "model.aimodel"
    asset.mkdir()
    (asset / "main.mlirb").write_bytes(b"ML\xefR")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program: Any = type("Spec", (), {"states": (), "methods": {}})()
    with largest_file(2**20), pytest.raises(BundleError, match=rf"no room to unpack it \(.*{tmp_path}"):
        runtime_module("coreai").load(asset, program)
