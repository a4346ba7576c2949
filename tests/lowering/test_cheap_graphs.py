"""Graph modules while a program is lowered: what they leave out, and that nothing is missing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, symbolic_trace

from exporter.tricks.deferred_code import deferred_code


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
