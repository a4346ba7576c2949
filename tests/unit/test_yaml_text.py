"""YAML texts as plain values: aliases are values of their own, and none grows without end."""

import pytest

from exporter.yaml_text import MOST_YAML_NODES, parse_yaml


def test_an_alias_is_a_value_of_its_own() -> None:
    value = parse_yaml("a: &one {b: [1, 2]}\nc: *one\n")
    assert value == {"a": {"b": [1, 2]}, "c": {"b": [1, 2]}}
    value["a"]["b"].append(3)
    assert value["c"] == {"b": [1, 2]}


def test_merged_keys_give_way_to_those_beside_them() -> None:
    assert parse_yaml("base: &base {b: 1, c: 2}\nd: {<<: *base, c: 3}")["d"] == {"b": 1, "c": 3}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("&a [*a]", "stands for itself"),
        ("a: &a {b: {<<: *a}}", "stands for itself"),
        ("a: 1\na: 2", "key 'a' twice"),
        ("a: {b: 1, 'b': 2}", "key 'b' twice"),
        ("[a]: 1", "as a key"),
        ("a: *b", "undefined alias"),
        ("[" * 5000, "recursion"),
    ],
)
def test_what_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_yaml(text)


def test_aliases_count_as_often_as_they_stand_there() -> None:
    """A scalar, lists of nine of it, and lists of nine of those."""
    ten = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a]\n"
    assert len(parse_yaml(ten + "c: [*b, *b]")["c"][1][8]) == 9
    over = MOST_YAML_NODES // 91 + 1  # b is 1 + 9 * (1 + 9) values
    with pytest.raises(ValueError, match=f"more than {MOST_YAML_NODES:,}"):
        parse_yaml(ten + f"c: [{', '.join(['*b'] * over)}]")
    assert len(parse_yaml(ten + f"c: [{', '.join(['*b'] * (over - 10))}]")["c"]) == over - 10
