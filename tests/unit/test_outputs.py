"""Files that commands write: regular ones are replaced, links followed, pipes and devices written through."""

from __future__ import annotations

import os
import pty
import socket
import stat
import threading
from pathlib import Path

import pytest

from exporter.errors import ConfigError
from exporter.outputs import check_output, written


def write(path: Path, data: bytes = b"new") -> None:
    with written(path) as partial:
        partial.write_bytes(data)


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "out"
    write(path, b"old")
    with written(path) as partial:
        partial.write_bytes(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


def test_one_that_fails_keeps_the_older(tmp_path: Path) -> None:
    path = tmp_path / "out"
    write(path, b"old")
    with pytest.raises(ZeroDivisionError), written(path) as partial:
        partial.write_bytes(b"half")
        raise ZeroDivisionError
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_one(tmp_path: Path, there: bool) -> None:
    (tmp_path / "folder").mkdir()
    link, target = tmp_path / "link", tmp_path / "folder" / "target"
    if there:
        target.write_bytes(b"old")
    (tmp_path / "middle").symlink_to(target)
    link.symlink_to("middle")
    write(link)
    assert link.is_symlink() and (tmp_path / "middle").is_symlink() and target.read_bytes() == b"new"
    assert list((tmp_path / "folder").iterdir()) == [target]


def test_a_pipe_is_written_through(tmp_path: Path) -> None:
    path, got = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: got.append(path.read_bytes()))
    reader.start()
    write(path, b"x" * 200_000)
    reader.join()
    assert got == [b"x" * 200_000]
    assert stat.S_ISFIFO(path.lstat().st_mode) and list(tmp_path.iterdir()) == [path]


def test_a_device_is_written_through() -> None:
    reader, terminal = pty.openpty()
    name = Path(os.ttyname(terminal))
    write(name)
    assert os.read(reader, 10) == b"new"
    assert stat.S_ISCHR(name.lstat().st_mode)
    os.close(reader)
    os.close(terminal)


def test_what_can_be_no_output_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "socket"))
    for path, said in (
        (tmp_path, "it is a directory"),
        (tmp_path / "no" / "file", "no such directory"),
        (tmp_path / "socket", "it is a socket"),
        (tmp_path / "loop", "Too many levels of symbolic links"),
    ):
        with pytest.raises(ConfigError, match=f"--out: got .*{path.name}.*{said}"):
            check_output("--out", path)
        with pytest.raises(OSError, match=said):
            write(path)
    check_output("--out", tmp_path / "new")
    assert {path.name for path in tmp_path.iterdir()} == {"loop", "socket"}
