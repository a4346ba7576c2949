"""How a command ends: one line for a mistake, nothing for a reader that left, and text as it was said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from exporter.console import messages, results, say

ROOT = Path(__file__).parents[2]
COMMAND = """
import errno, os, sys, typer
from exporter.console import results, run
from exporter.errors import ConfigError
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

@app.command()
def print_much(count: int = 1, what: str = "½"):
    for _ in range(count):
        results().print(what)

@app.command()
def mistake(what: str):
    raise ConfigError("x", got=what, expected="b", repair="c.")

@app.command()
def opens():
    with open("opened", "w") as file:
        print(file.fileno() > 2)
        sys.stdout.flush()

run(app, "test")
"""


def command(
    *arguments: str, shell: str = "", coding: str = "utf-8", folder: Path
) -> subprocess.CompletedProcess[bytes]:
    (folder / "command.py").write_text(COMMAND)
    line = ["bash", "-c", f'"$0" command.py "$@" {shell}', sys.executable, *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": coding}
    return subprocess.run(line, check=False, capture_output=True, cwd=folder, env=environment)


@pytest.mark.parametrize("coding", ["ascii", "ascii:strict", "cp1252", "utf-16"])
def test_a_character_that_the_terminal_lacks_is_replaced(tmp_path: Path, coding: str) -> None:
    done = command("print-much", "--what", "a½字", coding=coding, folder=tmp_path)
    assert done.returncode == 0 and done.stderr == b""
    assert done.stdout.decode(coding.partition(":")[0]).strip() == {"ascii": "a??", "cp1252": "a½?"}.get(
        coding.partition(":")[0], "a½字"
    )
    done = command("mistake", "字", coding=coding, folder=tmp_path)
    assert done.returncode == 2 and b"Traceback" not in done.stderr


@pytest.mark.parametrize("what", ["a[/b]", "x[red]y", "[link=x]", ":cat:", "\\[x"])
def test_what_was_said_is_printed_as_it_was(tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    say("error", what, "bold red")
    results().print(what)
    messages().print(what)
    seen = capsys.readouterr()
    assert seen.err.splitlines() == [f"error: {what}", what] and seen.out == f"{what}\n"
    done = command("mistake", what, folder=tmp_path)
    assert (done.returncode, done.stderr.decode()) == (2, f"error: x: got {what}; expected b. c.\n")


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    done = command("print-much", "--count", "20000", shell="| head -1; exit ${PIPESTATUS[0]}", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (1, "½\n".encode(), b"")


@pytest.mark.parametrize("count", ["1", "20000"])
def test_a_full_disk_behind_standard_output_is_one_line(tmp_path: Path, count: str) -> None:
    done = command("print-much", "--count", count, shell="> /dev/full", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.decode().splitlines() == [
        "error: standard output: got No space left on device; expected room for the results. Free some space."
    ]


def test_closed_streams_take_no_other_files_place(tmp_path: Path) -> None:
    done = command("opens", shell="<&- >&- 2>&-", folder=tmp_path)
    assert done.returncode == 0 and (tmp_path / "opened").read_text() == ""
    done = command("print-much", shell=">&-", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")
