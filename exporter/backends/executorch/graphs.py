"""Graph modules that cost what is asked of them: code is written when it is called, and nodes are sorted in place.

A graph module writes its Python code anew, and compiles it, whenever something says that its graph has changed: some
thousand times while a decoder is lowered, most of them for the whole of a method. Passes interpret graphs and call no
module. And for every delegate that is cut out, all nodes of the method are copied into a new graph, to be in order.
"""

from __future__ import annotations

import contextlib
import operator
from collections import deque
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from executorch.exir import lowered_backend_module
from torch.fx import GraphModule, Node
from torch.fx.graph import _PyTreeCodeGen

_compile = GraphModule.recompile


def _compile_when_called(module: GraphModule) -> None:
    """Stands for `GraphModule.recompile`, which nobody asks for the code that it returns."""
    codegen = module.graph._codegen
    if isinstance(codegen, _PyTreeCodeGen):
        module._in_spec, module._out_spec = codegen.pytree_info.in_spec, codegen.pytree_info.out_spec

    def forward(self: GraphModule, *args: Any, **kwargs: Any) -> Any:
        _compile(self)
        return self.forward(*args, **kwargs)

    type(module).forward = forward  # every graph module is of a class of its own


def sort_in_place(module: GraphModule) -> GraphModule:
    """`torch.fx.passes.tools_common.legalize_graph` without a new graph: nodes, and the users of each, in its order.

    Breadth first from the nodes that take nothing; of those that come within reach together, in the order of their
    uses, arithmetic on sizes goes first.
    """
    graph = module.graph
    missing = {node: 0 for node in graph.nodes}
    for node in graph.nodes:
        for user in node.users:
            missing[user] += 1
    queue = deque(node for node, count in missing.items() if not count)
    order: list[Node] = []
    while queue:
        node = queue.popleft()
        order.append(node)
        for user in node.users:
            missing[user] -= 1
            if not missing[user]:
                first = user.op == "call_function" and user.target in FIRST
                (queue.appendleft if first else queue.append)(user)
    if len(order) < len(missing):
        raise RuntimeError(f"graph with a circle: {[node for node, count in missing.items() if count]}")
    for node in order:
        graph._root.prepend(node)
        node.users.clear()
    for node in order:
        for needed in node.all_input_nodes:
            needed.users[node] = None
    module.recompile()
    return module


FIRST = (
    operator.add, operator.mul, operator.sub, operator.floordiv, operator.truediv, operator.mod,
    operator.le, operator.lt, operator.ge, operator.gt, operator.eq, operator.ne,
    torch.ops.aten.sym_constrain_range.default, torch.ops.aten.sym_constrain_range_for_size.default,
    torch.ops.aten._assert_async.msg, torch.ops.aten.scalar_tensor.default, torch.ops.aten._assert_scalar.default,
)  # fmt: skip


@contextlib.contextmanager
def graphs_kept_cheap() -> Iterator[None]:
    """Graph modules that are made or changed in here write their code when they are called, then or later."""
    with (
        mock.patch.object(GraphModule, "recompile", _compile_when_called),
        mock.patch.object(GraphModule, "__str__", object.__repr__),  # for messages to a log that nobody keeps
        mock.patch.object(lowered_backend_module, "legalize_graph", sort_in_place),
    ):
        yield
