"""Means over the last axis as products with a constant row.

XNNPACK takes ``aten.mean`` only over two axes of four, so each RMSNorm would cut the graph in two: 110 delegates in a
decode step of Gemma 3 270M instead of 20. ``mean(x) = linear(x, [1/d, ..., 1/d])`` is an ordinary product, and a number
that is added to it, such as a norm's epsilon, becomes its bias.
"""

from __future__ import annotations

import torch
from executorch.backends.transforms.utils import create_constant_placeholder
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node


def means_as_products(program: ExportedProgram) -> None:
    """Rewrite, in place, every mean over the last axis alone that keeps it."""
    graph = program.graph_module.graph
    first = next(node for node in graph.nodes if node.op == "placeholder")

    def constant(name: str, value: torch.Tensor) -> Node:
        with graph.inserting_before(first):
            return create_constant_placeholder(program, graph, name, InputKind.BUFFER, value, False)

    numbers: dict[float, Node] = {}
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.mean.dim or not _over_last_axis(node):
            continue
        size = int(node.args[0].meta["val"].shape[-1])
        arguments = [node.args[0], constant(f"mean_of_{size}", torch.full((1, size), 1 / size))]
        last = _sum_with_number(node) or node
        if last is not node:
            number = float(last.args[1])  # type: ignore[arg-type]
            if number not in numbers:
                numbers[number] = constant(f"added_to_mean_{len(numbers)}", torch.full((1,), number))
            arguments.append(numbers[number])
        with graph.inserting_before(last):
            product = graph.call_function(torch.ops.aten.linear.default, tuple(arguments))
        product.meta = dict(last.meta)
        last.replace_all_uses_with(product)
        for done in dict.fromkeys((last, node)):
            graph.erase_node(done)
    program.graph_module.recompile()


def _sum_with_number(mean: Node) -> Node | None:
    """The mean's one user, if that adds a number."""
    user = next(iter(mean.users)) if len(mean.users) == 1 else None
    adds = user is not None and user.target is torch.ops.aten.add.Tensor and not user.kwargs
    return user if adds and isinstance(user.args[1], float | int) else None  # type: ignore[union-attr]


def _over_last_axis(node: Node) -> bool:
    x, axes, *keep = node.args
    rank = x.meta["val"].dim()  # type: ignore[union-attr]
    return list(axes) in ([-1], [rank - 1]) and keep == [True] and isinstance(x.meta["val"].shape[-1], int)  # type: ignore
