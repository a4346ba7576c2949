"""docs/field-faults.md accounts for every fault, and every test it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
TEXT = (TESTS.parent / "docs" / "field-faults.md").read_text(encoding="utf-8")
NUMBERS = {
    *(1, 2, 3, 4, 6, 8, 9, 11, 12, 13, 14, 18, 19, 20, 21, 23, 24, 25, 26, 27, 29, 30, 31, 33, 36, 37, 39, 41, 42, 43),
    *(44, 45, 46, 47, 48, 49, 51),
}
ROWS = {
    int(cells[0]): cells[-1]
    for line in TEXT.splitlines()
    if (cells := [cell.strip() for cell in line.strip("|").split("|")])[0].isdigit()
}
LATER: set[int] = set()


def functions(path: str) -> set[str]:
    body = ast.parse((TESTS / path).read_text(encoding="utf-8")).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


def test_every_fault_has_one_row() -> None:
    assert set(ROWS) == NUMBERS
    assert len(re.findall(r"^\| \d+ \|", TEXT, re.M)) == len(ROWS)


def test_only_what_cannot_exist_yet_is_put_off() -> None:
    put_off = TEXT.partition("## Not applicable yet")[2]
    assert {int(number) for number in re.findall(r"^\| (\d+) \|", put_off, re.M)} == LATER


def test_every_test_that_is_named_exists() -> None:
    for number, cell in ROWS.items():
        named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", cell)
        assert named or number in LATER, number
        for path, name in named:
            assert name in functions(path), (number, path, name)


def test_numbered_tests_stand_in_their_row() -> None:
    for name in functions("field/test_field_faults.py"):
        if name.startswith("test_"):
            assert f"::{name}`" in ROWS[int(name.split("_")[1])]
