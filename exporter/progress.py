"""Progress of a long command: each step with its seconds and the process's peak memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from exporter.machine import peak_memory_bytes
from exporter.units import in_unit

Detail = Callable[[str], None]


class Progress:
    """Prints a line per finished step; on a terminal also the running step with its detail and elapsed time."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.seconds: dict[str, float] = {}

    @classmethod
    def silent(cls) -> Progress:
        """For library users: nothing is printed; `seconds` is kept all the same."""
        return cls(Console(quiet=True))

    @contextmanager
    def step(self, name: str) -> Iterator[Detail]:
        """Time one step; the yielded function replaces the detail shown beside it."""
        start = time.perf_counter()
        shown = ""
        with self.console.status(Text(name)) as status:

            def detail(text: str) -> None:
                nonlocal shown
                shown = text
                status.update(Text(f"{name}: {text} ({time.perf_counter() - start:.0f} s)"))

            yield detail
        self.seconds[name] = time.perf_counter() - start
        peak = f"peak {in_unit(peak_memory_bytes(), 'GB')}"
        self.console.print(f"  {name:<28}{self.seconds[name]:>8.1f} s   {peak:<14} {shown}")
