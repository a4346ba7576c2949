"""LEAF: what a cost trick is, and the one place that patches a library.

A trick makes an export or a run cheaper and changes nothing that is written or computed. It reaches into what a library
does not promise, so it is made for exact versions; on any other it steps aside, with one line in the log a process.
"""

from __future__ import annotations

import contextlib
import logging
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Generic, ParamSpec

P = ParamSpec("P")
log = logging.getLogger("exporter.tricks")

LOWERING = {"torch": "2.13.0", "executorch": "1.5.1"}
"""What the tricks of lowering are made for."""


def installed(what: str) -> str | None:
    """The version of a distribution without its local part, of `python` the first two numbers, of `libc` its name;
    None if there is none."""
    if what == "python":
        return f"{sys.version_info.major}.{sys.version_info.minor}"
    if what == "libc":
        return platform.libc_ver()[0] or None
    try:
        return version(what).partition("+")[0]
    except PackageNotFoundError:
        return None


def fits(name: str, made_for: Mapping[str, str], without: str) -> bool:
    """Whether all that `made_for` names is here in that version; said once a process of a `name` if not.

    Args:
        name: of the trick.
        made_for: by what `installed` takes.
        without: what is lost, for the log.
    """
    found = {what: installed(what) for what in made_for}
    if found == dict(made_for):
        return True
    say_once(name, f"{name} is left out: made for {_listed(made_for)}, found {_listed(found)}; {without}")
    return False


def _listed(versions: Mapping[str, str | None]) -> str:
    return ", ".join(f"{what} {number or 'none'}" for what, number in versions.items())


def say_once(name: str, line: str) -> None:
    """Log `line` as a warning, if `name` has not said anything in this process."""
    if name not in _said:
        _said.add(name)
        log.warning("%s", line)


_said: set[str] = set()


@dataclass(frozen=True)
class Trick(Generic[P]):
    """A context manager that saves something inside, or does nothing on other versions than it is made for.

    Attributes:
        name: that of its module.
        saves: what leaving it out costs, as measured (`docs/tricks.md`).
        made_for: exact versions, by what `installed` takes.
        inside: what it does.
    """

    name: str
    saves: str
    made_for: Mapping[str, str]
    inside: Callable[P, AbstractContextManager[None]]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[None]:
        return self.inside(*args, **kwargs) if self.applies() else contextlib.nullcontext()

    def applies(self) -> bool:
        """Whether it is made for what is here; said once a process if not."""
        return fits(f"trick {self.name}", self.made_for, f"without it: {self.saves}")


def trick(*, saves: str, made_for: Mapping[str, str]) -> Callable[[Callable[P, Iterator[None]]], Trick[P]]:
    """Make a `Trick` of a generator function, which has the name of its module."""

    def made(inside: Callable[P, Iterator[None]]) -> Trick[P]:
        assert inside.__module__.endswith(f".{inside.__name__}"), f"{inside.__name__} in {inside.__module__}"
        return Trick(inside.__name__, saves, made_for, contextlib.contextmanager(inside))

    return made


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, `name` of the module or class `owner` is `value`; it must be there before."""
    assert hasattr(owner, name), f"{owner} has no {name}"
    own = vars(owner).get(name)  # a static method as it stands in its class
    inherited = name not in vars(owner)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
