"""Graph modules while a program is lowered: what they leave out, and that nothing is missing."""

from __future__ import annotations

import contextlib
import copy
import operator
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import quantize_by
from tiny_models import GLOBAL, SLIDING, decoder_of, model
from torch.fx import Graph, GraphModule, Node, symbolic_trace
from torch.fx.passes.tools_common import legalize_graph

from exporter.backends.executorch import graphs
from exporter.backends.executorch import lower as lowering
from exporter.backends.executorch.lower import lower
from exporter.programs import Limits, trace
from exporter.spec import PROGRAMS, QuantizationSpec

LIMITS = Limits(max_context_length=64, max_prefill_chunk=32)


class Twice(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_a_module_called_runs_the_graph_as_it_was_last_said_to_be() -> None:
    compiled: list[GraphModule] = []
    original = graphs._compile

    def counted(module: GraphModule) -> Any:
        compiled.append(module)
        return original(module)

    x = torch.ones(2)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(graphs, "_compile", counted)
        with graphs.graphs_kept_cheap():
            module = symbolic_trace(Twice())
            product = next(node for node in module.graph.nodes if node.op == "call_function")
            product.args = (product.args[0], 3)
            module.recompile()
            assert not compiled
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
    assert described(graphs.sort_in_place(module)) == wanted
    assert [name for name, *_ in wanted] != before
    keys = [node._sort_key for node in module.graph.nodes]
    assert keys == sorted(set(keys)), "a node knows its place by its key"
    assert module.graph.find_nodes(op="placeholder") == [n for n in module.graph.nodes if n.op == "placeholder"]
    module.graph.lint()


def test_a_circle_is_no_order() -> None:
    module = tangle(0)
    first = next(node for node in module.graph.nodes if node.op == "call_function" and node.users)
    first.args = (next(iter(first.users)), first.args[1])
    with pytest.raises(RuntimeError, match="circle"):
        graphs.sort_in_place(module)


@pytest.mark.parametrize("linear", ["none", "int8"])
def test_cheap_graphs_change_no_byte(linear: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    decoder = decoder_of(model(SLIDING, GLOBAL), kernels="executorch", context=64)
    quantize_by(QuantizationSpec(linear=linear), decoder)
    sorted_in_place: list[int] = []
    original = graphs.sort_in_place

    def counted(module: GraphModule) -> GraphModule:
        sorted_in_place.append(len(module.graph.nodes))
        return original(module)

    monkeypatch.setattr(graphs, "sort_in_place", counted)

    def data() -> bytes:
        lower({name: trace(decoder, kind, LIMITS) for name, kind in PROGRAMS.items()}, tmp_path / "model.pte")
        return (tmp_path / "model.pte").read_bytes()

    cheap, count = data(), len(sorted_in_place)
    assert count > 4, "a call for every delegate"
    monkeypatch.setattr(lowering, "graphs_kept_cheap", contextlib.nullcontext)
    assert data() == cheap and len(sorted_in_place) == count
