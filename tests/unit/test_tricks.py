"""Cost tricks: each is made for exact versions and steps aside on any other, with one line in the log."""

from __future__ import annotations

import gc
import importlib
import logging
import pkgutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import exporter.tricks
from exporter.tricks import base
from exporter.tricks.base import Trick, fits, installed, patched, trick
from exporter.tricks.rare_collections import NEW_OBJECTS, rare_collections

ROOT = Path(__file__).parents[2]
NAMES = [module.name for module in pkgutil.iter_modules(exporter.tricks.__path__) if module.name != "base"]


def named(name: str) -> Trick[Any]:
    """The trick of that name, which its module holds under it."""
    found: Trick[Any] = getattr(importlib.import_module(f"exporter.tricks.{name}"), name)
    return found


def pins() -> dict[str, str]:
    """The exact versions that this project asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return dict(one.split("==") for one in project["dependencies"] if "==" in one)


@pytest.mark.parametrize("name", NAMES)
def test_a_trick_is_made_for_the_versions_that_are_pinned(name: str) -> None:
    """Whoever changes a pin looks at the tricks and measures them anew."""
    own = named(name)
    assert own.name == name and own.made_for
    for what, number in own.made_for.items():
        assert pins().get(what, number) == number
        assert what in pins() or what in ("python", "libc")


@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_what_a_trick_saves(name: str) -> None:
    own = named(name)
    (row,) = [line for line in (ROOT / "docs" / "tricks.md").read_text().splitlines() if line.startswith(f"| `{name}`")]
    assert own.saves in row
    assert ", ".join(f"{what} {number}" for what, number in own.made_for.items()) in row


def test_no_library_is_imported_before_a_trick_is_entered() -> None:
    code = "import sys\n" + "".join(f"import exporter.tricks.{name}\n" for name in NAMES)
    code += "print(sorted({'torch', 'executorch', 'numpy'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def toy(made_for: dict[str, str]) -> tuple[Trick[[int]], list[int]]:
    entered: list[int] = []

    def inside(number: int) -> Iterator[None]:
        entered.append(number)
        yield
        entered.append(-number)

    inside.__module__ = "some.inside"
    return trick(saves="a third", made_for=made_for)(inside), entered


def test_a_trick_is_entered_on_the_versions_that_it_is_made_for() -> None:
    own, entered = toy({"pytest": str(installed("pytest")), "python": f"{sys.version_info[0]}.{sys.version_info[1]}"})
    with own(7):
        assert entered == [7]
    assert entered == [7, -7] and own.name == "inside"


@pytest.mark.parametrize(
    ("other", "said"), [({"pytest": "0.1"}, "pytest 0.1"), ({"no-such-package": "1"}, "found no-such-package none")]
)
def test_on_any_other_it_steps_aside_and_says_so_once(
    other: dict[str, str], said: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "_said", set())
    own, entered = toy(other)
    for _ in range(3):
        with own(7):
            pass
    assert not entered
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "\n" not in record.getMessage()
    assert "trick inside is left out" in record.getMessage() and said in record.getMessage()
    assert record.getMessage().endswith("without it: a third")


def test_one_of_several_versions_is_enough_to_step_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "installed", {"one": "1.0", "two": "2.1"}.get)
    assert fits("it", {"one": "1.0", "two": "2.1"}, "nothing")
    assert not fits("it", {"one": "1.0", "two": "2.0"}, "nothing")


def test_a_local_version_is_the_same_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "version", lambda name: "2.13.0+cpu")
    assert installed("torch") == "2.13.0"


class Parent:
    number = 1

    @staticmethod
    def doubled(x: int) -> int:
        return 2 * x


class Child(Parent):
    own = 3


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_a_patch_is_undone_whatever_happens(error: type[Exception] | None) -> None:
    before = dict(vars(Parent)), dict(vars(Child))

    def use() -> None:
        with (
            patched(Child, "own", 30),
            patched(Child, "number", 10),
            patched(Parent, "doubled", staticmethod(lambda x: 3 * x)),
            patched(base, "LOWERING", {}),
        ):
            assert (Child.own, Child.number, Parent.number, Child().doubled(1)) == (30, 10, 1, 3)
            assert base.LOWERING == {}
            if error is not None:
                raise error

    if error is None:
        use()
    else:
        with pytest.raises(error):
            use()
    assert (dict(vars(Parent)), dict(vars(Child))) == before
    assert base.LOWERING and isinstance(vars(Parent)["doubled"], staticmethod)


def test_what_is_not_there_cannot_be_patched() -> None:
    with pytest.raises(AssertionError, match="no gone"), patched(Parent, "gone", 1):
        pass


def test_collections_are_few_inside_only() -> None:
    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()

    def count(objects: int) -> int:
        """Of collections while that many objects are made that stay."""
        before = sum(generation["collections"] for generation in gc.get_stats())
        held = [[] for _ in range(objects)]
        assert len(held) == objects
        return sum(generation["collections"] for generation in gc.get_stats()) - before

    outside = count(5 * NEW_OBJECTS)
    with pytest.raises(KeyError), rare_collections():
        assert gc.get_freeze_count() > frozen + 1_000, "what there was is left out"
        assert gc.get_threshold() == (NEW_OBJECTS, *thresholds[1:])
        assert count(5 * NEW_OBJECTS) <= 5 < outside
        raise KeyError
    assert gc.get_threshold() == thresholds and gc.get_freeze_count() == frozen
