"""LEAF: where commands print what was asked for."""

from __future__ import annotations

from rich.console import Console


def results() -> Console:
    """Standard output; a log is not 80 columns wide."""
    console = Console()
    return console if console.is_terminal else Console(width=160)
