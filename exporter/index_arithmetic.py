"""One mask and one set of slots for all layers of a traced program."""

from __future__ import annotations

from typing import Any

from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.node import map_arg


def merge_index_arithmetic(program: ExportedProgram) -> None:
    """Merge, in place, equal steps of arithmetic on shapes and literals.

    Every layer builds its mask and its slots from the same sizes; back ends do not merge them (portable kernels spent
    a sixth of Gemma 3 270M's prefill on masks). Nothing that reads a tensor from outside is touched, so no read moves
    past a write.
    """
    graph = program.graph_module.graph
    first: dict[tuple[Any, ...], Node] = {}
    pure: set[Node] = set()
    for node in list(graph.nodes):
        if node.op != "call_function" or not _from_shapes(node, pure) or _changes_something(node):
            continue
        pure.add(node)
        key = (node.target, repr(map_arg(node.args, _name)), repr(map_arg(node.kwargs, _name)))
        if key in first:
            node.replace_all_uses_with(first[key])
            graph.erase_node(node)
        else:
            first[key] = node
    program.graph_module.recompile()


def _name(node: Node) -> str:
    return node.name


def _from_shapes(node: Node, pure: set[Node]) -> bool:
    return "sym_size" in str(node.target) or all(operand in pure for operand in node.all_input_nodes)


def _changes_something(node: Node) -> bool:
    if any(_writes(node, operand) for operand in node.all_input_nodes):
        return True
    # A step without users has an effect, such as an assertion.
    return not node.users or any(_writes(user, node) for user in node.users)


def _writes(node: Node, operand: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    given = zip(schema.arguments, node.args, strict=False)  # operators name what they write first
    return any(own.alias_info is not None and own.alias_info.is_write and value is operand for own, value in given)
