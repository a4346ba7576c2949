"""LEAF: how commands print, and how they end.

What users and files say is never read as markup: a path may hold brackets, and a model's name `:cat:`.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import NoReturn

import typer
from rich.console import Console
from rich.text import Text

from exporter.errors import UserError
from exporter.quiet import quieten_libraries


def results() -> Console:
    """Standard output; a log is not 80 columns wide."""
    console = Console(markup=False, emoji=False, highlight=False)
    return console if console.is_terminal else Console(markup=False, emoji=False, highlight=False, width=160)


def messages() -> Console:
    """Standard error: progress, warnings, errors."""
    return Console(stderr=True, markup=False, emoji=False, highlight=False)


def say(kind: str, text: str, style: str) -> None:
    """One line on standard error, whatever its length: ``error: ...``."""
    messages().print(Text.assemble((f"{kind}:", style), " ", text), soft_wrap=True)


def run(app: typer.Typer, name: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command line and end the process: with 0, with 1 for an answer that is no, with 2 for a mistake of the
    user's, which is one line on standard error, and without a word where nobody reads on (``| head``)."""
    _open_streams()
    quieten_libraries()
    code = 0
    try:
        app(args=arguments, prog_name=name)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except UserError as error:
        say("error", str(error), "bold red")
        code = error.exit_code
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE):
            raise
        code = _cannot_print(error)
    try:
        sys.stdout.flush()
    except OSError as error:
        code = _cannot_print(error)
    raise SystemExit(code)


def _open_streams() -> None:
    """Standard streams that were closed (``>&-``) lead nowhere, or the next file to be opened would take their place.
    A character that the terminal's encoding lacks is replaced."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115  for as long as the process
        found = getattr(sys, stream)
        if isinstance(found, TextIOWrapper):
            found.reconfigure(errors="replace" if stream == "stdout" else "backslashreplace")


def _cannot_print(error: OSError) -> int:
    """Standard output takes no more: what is left of it goes nowhere, so that Python does not complain as it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    if error.errno == errno.EPIPE:
        return 1
    say("error", f"standard output: got {error.strerror}; expected room for the results. Free some space.", "bold red")
    return 2
