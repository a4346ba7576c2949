"""Graph modules while a program is lowered: what they leave out, and that nothing is missing."""

from __future__ import annotations

import copy
import operator
import random
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, Node, symbolic_trace
from torch.fx.passes.tools_common import legalize_graph

from exporter.tricks.deferred_code import deferred_code
from exporter.tricks.sorted_in_place import sort_in_place


class Twice(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_a_module_called_runs_the_graph_as_it_was_last_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[GraphModule] = []
    original = GraphModule.recompile

    def counted(module: GraphModule) -> Any:
        compiled.append(module)
        return original(module)

    x = torch.ones(2)
    monkeypatch.setattr(GraphModule, "recompile", counted)
    with deferred_code():
        module = symbolic_trace(Twice())
        product = next(node for node in module.graph.nodes if node.op == "call_function")
        product.args = (product.args[0], 3)
        module.recompile()
        assert not compiled and str(module), "a module without code is printed all the same"
        assert module(x).tolist() == [3, 3] and module(x).tolist() == [3, 3]
        assert compiled == [module]
        product.args = (product.args[0], 4)
        module.recompile()
        copied = copy.deepcopy(module)
        assert compiled == [module]
    assert module(x).tolist() == [4, 4] and copied(x).tolist() == [4, 4]
    product.args = (product.args[0], 5)
    module.recompile()
    assert module(x).tolist() == [5, 5] and "5" in module.code


def tangle(seed: int) -> GraphModule:
    """Some nodes that take of each other at random, in an order that is not theirs: each after what it takes at first,
    then half of them to the front."""
    sizes = operator.add, torch.ops.aten.scalar_tensor.default
    chance, graph = random.Random(seed), Graph()
    nodes: list[Node] = [graph.placeholder(f"x{n}") for n in range(3)]
    for _ in range(40):
        taken = chance.choices(nodes, k=2)
        nodes.append(graph.call_function(chance.choice((torch.sub, torch.div, *sizes)), tuple(taken)))
    graph.output(tuple(node for node in nodes if not node.users))
    for node in chance.sample(nodes, 20):
        graph._root.append(node)
    return GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize("seed", range(20))
def test_sorted_in_place_as_into_a_new_graph(seed: int) -> None:
    """The order of the nodes, that of the users of each, and what each takes."""

    def described(module: GraphModule) -> list[Any]:
        return [(n.name, str(n.args), [user.name for user in n.users]) for n in module.graph.nodes]

    module = tangle(seed)
    before = [node.name for node in module.graph.nodes]
    wanted = described(legalize_graph(tangle(seed)))
    assert described(sort_in_place(module)) == wanted
    assert [name for name, *_ in wanted] != before
    keys = [node._sort_key for node in module.graph.nodes]
    assert keys == sorted(set(keys)), "a node knows its place by its key"
    assert module.graph.find_nodes(op="placeholder") == [n for n in module.graph.nodes if n.op == "placeholder"]
    module.graph.lint()


def test_a_cycle_is_no_order() -> None:
    module = tangle(0)
    first = next(node for node in module.graph.nodes if node.op == "call_function" and node.users)
    first.args = (next(iter(first.users)), first.args[1])
    with pytest.raises(RuntimeError, match="cycle"):
        sort_in_place(module)
