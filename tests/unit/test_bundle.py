"""A bundle is written whole or not at all, and every alteration is noticed."""

import errno
import json
import os
import stat
from pathlib import Path

import pytest
from toy import toy_bundle, toy_manifest

from exporter.bundle import MANIFEST_NAME, read_bundle, write_bundle
from exporter.errors import BundleError
from exporter.inspection import inspect


def everything(directory: Path) -> dict[str, bytes]:
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_round_trip(tmp_path: Path) -> None:
    written = toy_bundle(tmp_path / "new" / "toy")
    read = read_bundle(tmp_path / "new" / "toy")
    assert read.manifest == written.manifest
    assert set(read.manifest.files) == {"model.pte", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"}
    assert read.manifest.files["model.pte"].bytes == 10
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["toy"]  # nothing left beside it


@pytest.mark.parametrize(
    ("umask", "file", "directory"), [(0o022, 0o644, 0o755), (0o027, 0o640, 0o750), (0, 0o666, 0o777)]
)
def test_modes_are_what_the_umask_says(tmp_path: Path, umask: int, file: int, directory: int) -> None:
    """Also of what a library made for its owner alone, as temporary files and those of safetensors are."""
    before = os.umask(umask)
    try:
        with write_bundle(tmp_path / "toy") as writer:
            (writer.path / "weights").mkdir(mode=0o700)
            for name in ("model.pte", "weights/one", "weights/two"):
                (writer.path / name).write_bytes(b"no program")
            (writer.path / "model.pte").chmod(0o600)
            (writer.path / "weights" / "one").chmod(0o755)
            writer.finish(toy_manifest())
    finally:
        os.umask(before)
    modes = {path.relative_to(tmp_path).as_posix(): stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    files = ("manifest.json", "model.pte", "weights/one", "weights/two")
    assert modes == {"toy": directory, "toy/weights": directory, **{f"toy/{name}": file for name in files}}


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), ValueError("lowering failed"), OSError(errno.EACCES, "no")])
def test_nothing_remains_of_a_failed_export(tmp_path: Path, failure: BaseException) -> None:
    with pytest.raises(type(failure)), write_bundle(tmp_path / "toy") as writer:
        (writer.path / "model.pte").write_bytes(b"half")
        assert list(tmp_path.iterdir()) == [writer.path.parent]  # on the target's own file system
        raise failure
    assert list(tmp_path.iterdir()) == []


def test_leaving_without_finish_is_a_bug_of_ours(tmp_path: Path) -> None:
    with pytest.raises(AssertionError), write_bundle(tmp_path / "toy"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_disk_full_says_so_and_leaves_the_old_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy_bundle(tmp_path / "toy")
    before = everything(tmp_path)

    def full(self: Path, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(BundleError, match="disk full"):
        toy_bundle(tmp_path / "toy")
    assert everything(tmp_path) == before


def test_a_limit_of_file_sizes_is_said(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="File too large"), write_bundle(tmp_path / "toy"):
        raise OSError(errno.EFBIG, "File too large")
    assert list(tmp_path.iterdir()) == []


def test_whatever_is_wrong_with_a_staged_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="Input/output error"), write_bundle(tmp_path / "toy") as writer:
        raise OSError(errno.EIO, "Input/output error", str(writer.path / "model.pte"))
    with pytest.raises(BundleError, match="No such file"), write_bundle(tmp_path / "toy") as writer:
        writer.path.rmdir()  # by somebody else
        (writer.path / "model.pte").write_bytes(b"half")
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_another_file_is_not_the_outputs(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), write_bundle(tmp_path / "toy"):
        (tmp_path / "weights").read_bytes()
    elsewhere = tmp_path.parent / "elsewhere" / "tmp"
    with pytest.raises(BundleError, match=rf"disk full \({elsewhere}\)"), write_bundle(tmp_path / "toy"):
        raise OSError(errno.ENOSPC, "No space left on device", str(elsewhere))
    assert list(tmp_path.iterdir()) == []


def test_an_older_bundle_is_replaced_whole(tmp_path: Path) -> None:
    toy_bundle(tmp_path / "toy", template="old")
    toy_bundle(tmp_path / "toy", toy_manifest(context=64))
    assert read_bundle(tmp_path / "toy").manifest.max_context_length == 64
    assert not (tmp_path / "toy" / "tokenizer" / "chat_template.jinja").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["toy"]


def test_the_old_bundle_comes_back_when_the_rename_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy_bundle(tmp_path / "toy")
    before = everything(tmp_path)
    rename, calls = os.rename, []

    def third_fails(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 3:  # onto the old bundle, which is refused; the old bundle aside; the new one in its place
            raise OSError(errno.EIO, "I/O error")
        rename(source, target)

    monkeypatch.setattr("exporter.staging.os.rename", third_fails)
    with pytest.raises(OSError, match="I/O error"):
        toy_bundle(tmp_path / "toy", toy_manifest(context=64))
    assert everything(tmp_path) == before


@pytest.mark.parametrize("content", ["notes", "foreign manifest", "bundle and notes", "file"])
def test_what_is_no_bundle_is_refused_before_any_work(tmp_path: Path, content: str) -> None:
    target = tmp_path / "out"
    if content == "file":
        target.write_text("mine")
    elif content == "bundle and notes":
        toy_bundle(target)
        (target / "notes.txt").write_text("mine")
    else:
        target.mkdir()
        name = MANIFEST_NAME if content == "foreign manifest" else "notes.txt"
        (target / name).write_text('{"name": "another tool"}')
    before = everything(tmp_path)
    with pytest.raises(BundleError, match="output out"), write_bundle(target):
        pytest.fail("work was begun")
    assert everything(tmp_path) == before


def test_a_program_that_was_not_staged_is_a_bug_of_ours(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"model\.pte"), write_bundle(tmp_path / "toy") as writer:
        writer.finish(toy_manifest())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["missing", "truncated", "altered"])
def test_a_damaged_file_is_named_with_both_sums(tmp_path: Path, damage: str) -> None:
    manifest = toy_bundle(tmp_path / "toy").manifest
    file = tmp_path / "toy" / "model.pte"
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(b"no pro" if damage == "truncated" else b"no Program")
    with pytest.raises(BundleError, match=r"model\.pte") as caught:
        read_bundle(tmp_path / "toy")
    assert manifest.files["model.pte"].sha256 in caught.value.expected
    if damage != "missing":
        assert "sha256" in caught.value.got
        assert manifest.files["model.pte"].sha256 not in caught.value.got
    assert read_bundle(tmp_path / "toy", verify_files=False).manifest == manifest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "manifest version 99"),
        ({"surprise": 1}, "surprise"),
        ({"max_context_length": "many"}, "max_context_length"),
        ({"files": {"../secret": {"bytes": 1, "sha256": "0"}}}, "secret"),
        ({"files": {}}, r"model\.pte"),
    ],
)
def test_an_unreadable_manifest_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    toy_bundle(tmp_path / "toy")
    file = tmp_path / "toy" / MANIFEST_NAME
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(BundleError, match=message):
        read_bundle(tmp_path / "toy")


@pytest.mark.parametrize("content", [None, "{", "[]", "3"])
def test_no_manifest(tmp_path: Path, content: str | None) -> None:
    (tmp_path / "toy").mkdir()
    if content is not None:
        (tmp_path / "toy" / MANIFEST_NAME).write_text(content)
    with pytest.raises(BundleError):
        read_bundle(tmp_path / "toy")
    with pytest.raises(BundleError, match="no such directory"):
        read_bundle(tmp_path / "nowhere")


def test_names_that_no_file_system_takes_are_names_of_nothing(tmp_path: Path) -> None:
    long = "x" * 300
    with pytest.raises(BundleError, match="File name too long"):
        read_bundle(tmp_path / long)
    with pytest.raises(BundleError, match="File name too long"):
        inspect(tmp_path / long)
    toy_bundle(tmp_path / "toy")
    file = tmp_path / "toy" / MANIFEST_NAME
    manifest = json.loads(file.read_text())
    manifest["files"][long] = {"bytes": 1, "sha256": "0"}
    file.write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=f"no file {long}"):
        read_bundle(tmp_path / "toy")
