"""What is written beside a bundle's place: gone however its owner ends, and never taken from an owner that lives."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from toy import toy_bundle, toy_manifest

from exporter import staging
from exporter.bundle import read_bundle, write_bundle
from exporter.staging import sweep

HOLD = """
import signal, sys, time
from pathlib import Path
from exporter.cli import app as cli
from exporter.bundle import write_bundle

@cli.app.command()
def hold(out: Path) -> None:
    with write_bundle(out) as writer:
        (writer.path / "model.pte").write_bytes(b"half")
        print("ready", flush=True)
        time.sleep(60)

# Whatever the tests themselves were started with, e.g. in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.Handlers[sys.argv[2]])
sys.argv = ["exporter", "hold", sys.argv[1]]
cli.main()
"""
"""The command line in the middle of an export."""


SLOW = """
import time
from exporter import staging
remove = staging._remove

def slow(directory) -> None:
    if directory.suffix == ".partial":
        print("removing", flush=True)
        time.sleep(0.3)
    remove(directory)

staging._remove = slow
"""


def stopped(target: Path, *by: signal.Signals, hangup: str = "SIG_DFL", slow: bool = False) -> tuple[int, str]:
    """The exit code of a process that got the signals in the middle of an export, and its stderr. `hangup`: what it
    was started to do with SIGHUP. `slow`: all but the first come while it removes what it made."""
    command = [sys.executable, "-c", SLOW * slow + HOLD, str(target), hangup]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    for place, number in enumerate(by):
        assert not (slow and place == 1) or child.stdout.readline() == "removing\n"
        child.send_signal(number)
    _, said = child.communicate(timeout=60)
    return child.returncode, said


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_asks_leaves_nothing(tmp_path: Path, by: signal.Signals) -> None:
    code, said = stopped(tmp_path / "toy", by)
    assert code == 128 + by
    assert "Traceback" not in said
    assert names(tmp_path) == []


@pytest.mark.parametrize("again", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_second_signal_waits_until_all_is_removed(tmp_path: Path, again: signal.Signals) -> None:
    """Ctrl-C pressed twice, or a supervisor that asks again."""
    code, said = stopped(tmp_path / "toy", signal.SIGINT, again, slow=True)
    assert code == 128 + again
    assert "Traceback" not in said
    assert names(tmp_path) == []


def test_a_signal_that_is_ignored_stays_so(tmp_path: Path) -> None:
    """Under ``nohup``."""
    code, _ = stopped(tmp_path / "toy", signal.SIGHUP, signal.SIGTERM, hangup="SIG_IGN")
    assert code == 128 + signal.SIGTERM
    assert names(tmp_path) == []


def test_what_a_killed_one_left_goes_with_the_next_to_that_place(tmp_path: Path) -> None:
    assert stopped(tmp_path / "toy", signal.SIGKILL)[0] == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert (left / "toy" / "model.pte").read_bytes() == b"half"
    toy_bundle(tmp_path / "toy.2")
    assert names(tmp_path) == sorted([left.name, "toy.2"])  # another place's is not ours to judge
    toy_bundle(tmp_path / "toy")
    assert names(tmp_path) == ["toy", "toy.2"]


def test_it_goes_though_the_next_one_fails(tmp_path: Path) -> None:
    (tmp_path / ".toy.0123abcd.partial").mkdir()
    with pytest.raises(ValueError, match="no"), write_bundle(tmp_path / "toy"):
        raise ValueError("no")
    assert names(tmp_path) == []


def test_what_has_another_name_stays(tmp_path: Path) -> None:
    others = [".toy.2.0123abcd.partial", ".toy.0123abcd.partial.txt", ".toy.mine.partial", ".[toy].0123abcd.old"]
    for name in others:
        (tmp_path / name).mkdir()
    toy_bundle(tmp_path / "toy")
    assert names(tmp_path) == sorted([*others, "toy"])
    (tmp_path / ".toy.0123abcd.partial").mkdir()
    toy_bundle(tmp_path / "t.y")
    assert names(tmp_path) == sorted([*others, ".toy.0123abcd.partial", "toy", "t.y"])


def test_one_that_lives_keeps_its_own_while_another_is_published(tmp_path: Path) -> None:
    with write_bundle(tmp_path / "toy") as writer:
        (writer.path / "model.pte").write_bytes(b"no program")
        toy_bundle(tmp_path / "toy", template="other")
        assert names(writer.path) == ["model.pte"]
        assert read_bundle(tmp_path / "toy").manifest.tokenizer.has_chat_template
        writer.finish(toy_manifest(context=64))
    assert read_bundle(tmp_path / "toy").manifest.max_context_length == 64  # the later one stays
    assert names(tmp_path) == ["toy"]


def test_many_at_once_to_one_place(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        written = list(
            pool.map(lambda context: toy_bundle(tmp_path / "toy", toy_manifest(context=context)), range(32, 96))
        )
    assert read_bundle(tmp_path / "toy").manifest in [bundle.manifest for bundle in written]
    assert names(tmp_path) == ["toy"]


def test_one_that_is_published_between_two_renames_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The place is free for a moment; whoever is there in it steps aside in its turn."""
    toy_bundle(tmp_path / "toy")
    rename, seen = os.rename, []

    def with_another(source: Path, target: Path) -> None:
        rename(source, target)
        if target.suffix == ".old" and not seen:
            seen.append(target)
            toy_bundle(tmp_path / "toy", template="other")

    monkeypatch.setattr("exporter.staging.os.rename", with_another)
    toy_bundle(tmp_path / "toy", toy_manifest(context=64))
    assert seen
    assert read_bundle(tmp_path / "toy").manifest.max_context_length == 64
    assert names(tmp_path) == ["toy"]


def test_a_bundle_that_a_killed_one_had_moved_aside_goes_back(tmp_path: Path) -> None:
    manifest = toy_bundle(tmp_path / "toy").manifest
    os.rename(tmp_path / "toy", tmp_path / ".toy.0123abcd.old")
    (tmp_path / ".toy.0123abcd.partial" / "toy").mkdir(parents=True)
    with pytest.raises(ValueError, match="no"), write_bundle(tmp_path / "toy"):
        raise ValueError("no")
    assert names(tmp_path) == ["toy"]
    assert read_bundle(tmp_path / "toy").manifest == manifest


def test_one_that_stepped_aside_goes_when_another_stands_in_its_place(tmp_path: Path) -> None:
    toy_bundle(tmp_path / "toy", template="new")
    shutil.copytree(tmp_path / "toy", tmp_path / ".toy.0123abcd.old")
    sweep(tmp_path / "toy")
    assert names(tmp_path) == ["toy"]


@pytest.mark.parametrize("before", ["os.open", "fcntl.flock"])
def test_a_sweep_between_making_the_directory_and_locking_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    module, name = before.split(".")
    call, swept = getattr(getattr(staging, module), name), []

    def after_a_sweep(*arguments: object, **more: object) -> object:
        if not swept:
            swept.extend(tmp_path.iterdir())
            sweep(tmp_path / "toy")
            assert names(tmp_path) == []
        return call(*arguments, **more)

    monkeypatch.setattr(getattr(staging, module), name, after_a_sweep)
    with write_bundle(tmp_path / "toy") as writer:
        assert [writer.path.parent] != swept and len(swept) == 1
        (writer.path / "model.pte").write_bytes(b"no program")
        writer.finish(toy_manifest())
    assert names(tmp_path) == ["toy"]


def test_without_locks_nothing_is_taken_for_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    (tmp_path / ".toy.0123abcd.partial").mkdir()
    monkeypatch.setattr(staging.fcntl, "flock", no_locks)
    toy_bundle(tmp_path / "toy")
    toy_bundle(tmp_path / "toy", template="again")
    assert read_bundle(tmp_path / "toy").manifest.tokenizer.has_chat_template
    assert names(tmp_path) == [".toy.0123abcd.partial", "toy"]


@contextmanager
def a_directory_of_no_superuser() -> Iterator[Path]:
    """Whom permissions bind."""
    directory = Path(tempfile.mkdtemp(dir="/tmp"))
    other = 65534 if os.geteuid() == 0 else os.geteuid()
    os.chown(directory, other, -1)
    before = os.geteuid()
    os.seteuid(other)
    try:
        yield directory
    finally:
        os.seteuid(before)
        for name, _, _ in os.walk(directory):
            os.chmod(name, 0o700)
        shutil.rmtree(directory)


def test_a_bundle_made_read_only_is_replaced_whole() -> None:
    with a_directory_of_no_superuser() as directory:
        toy_bundle(directory / "toy")
        for name, _, files in os.walk(directory / "toy"):
            for file in files:
                os.chmod(Path(name, file), 0o444)
            os.chmod(name, 0o555)
        toy_bundle(directory / "toy", toy_manifest(context=64))
        assert read_bundle(directory / "toy").manifest.max_context_length == 64
        assert names(directory) == ["toy"]
