"""LEAF: YAML texts as plain values."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

MOST_YAML_NODES = 100_000
"""With every alias written out: a few lines of aliases of aliases stand for more than any memory holds."""


class _Loader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys; here the second one is an error. So are aliases that come to more than
    `MOST_YAML_NODES`, or stand for themselves."""

    def get_single_node(self) -> yaml.Node | None:
        root: yaml.Node | None = super().get_single_node()
        if root is not None and _written_out(root, {}) > MOST_YAML_NODES:
            raise yaml.composer.ComposerError(None, None, f"more than {MOST_YAML_NODES:,} values", root.start_mark)
        return root

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":  # `<<`: its mapping's keys give way to those beside it
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, f"{key!r:.40} as a key", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """The value of a YAML text.

    Raises:
        ValueError: it is no YAML, or has equal keys, or more values or levels than are read.
    """
    try:
        return _unshared(yaml.load(text, Loader=_Loader))
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:  # of numbers and dates that are none, too
        raise ValueError(" ".join(str(error).split())) from error


def _written_out(node: yaml.Node, sizes: dict[yaml.Node, int | None]) -> int:
    """How many values a YAML node is with its aliases written out; `sizes` has those found, None for one begun."""
    if node not in sizes:
        sizes[node] = None
        inner = node.value if isinstance(node, yaml.CollectionNode) else ()
        pairs = (part for item in inner for part in (item if isinstance(item, tuple) else (item,)))
        sizes[node] = 1 + sum(_written_out(part, sizes) for part in pairs)
    size = sizes[node]
    if size is None:
        raise yaml.composer.ComposerError(None, None, "an alias that stands for itself", node.start_mark)
    return size


def _unshared(value: Any) -> Any:
    """A YAML value in which no two places are one object: a key is replaced in one of them."""
    if isinstance(value, dict):
        return {key: _unshared(inner) for key, inner in value.items()}
    return [_unshared(inner) for inner in value] if isinstance(value, list) else value
