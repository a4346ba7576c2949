"""Lowering's order of cache writes among reads, on graphs put together by hand."""

from __future__ import annotations

import pytest
import torch
from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401  registers llama::*
from torch.fx import Graph

from exporter.backends.executorch.lower import _order_writes

WRITE_FIRST, WRITE_LAST = torch.ops.llama.update_cache.default, torch.ops.llama.update_cache_with_indices.default


def names(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes]


def test_a_write_is_put_before_a_read_that_was_scheduled_early() -> None:
    """With what it needs: a read of the state alone may stand before the rows to write were even computed."""
    graph = Graph()
    state, hidden = graph.placeholder("state"), graph.placeholder("hidden")
    read = graph.call_function(torch.ops.aten.neg.default, (state,))
    rows = graph.call_function(torch.ops.aten.abs.default, (hidden,))
    graph.call_function(WRITE_FIRST, (rows, state, 0))
    graph.output((read,))
    _order_writes(graph)
    graph.lint()
    assert names(graph) == ["state", "hidden", "abs_default", "update_cache_default", "neg_default", "output"]


def test_a_write_is_put_behind_every_read_of_a_program_that_reads_first() -> None:
    graph = Graph()
    state, rows, slots = (graph.placeholder(name) for name in ("state", "rows", "slots"))
    first = graph.call_function(torch.ops.aten.neg.default, (state,))
    graph.call_function(WRITE_LAST, (rows, state, 0, slots))
    second = graph.call_function(torch.ops.aten.abs.default, (state,))
    graph.output((first, second))
    _order_writes(graph)
    graph.lint()
    assert names(graph)[3:] == ["neg_default", "abs_default", "update_cache_with_indices_default", "output"]


def test_a_graph_in_order_stays_as_it_is() -> None:
    graph = Graph()
    state, rows = graph.placeholder("state"), graph.placeholder("rows")
    graph.call_function(WRITE_FIRST, (rows, state, 0))
    other = graph.call_function(torch.ops.aten.abs.default, (rows,))
    read = graph.call_function(torch.ops.aten.neg.default, (state,))
    graph.output((read, other))
    before = names(graph)
    _order_writes(graph)
    assert names(graph) == before


def test_rows_that_depend_on_a_read_that_must_follow_them_have_no_order() -> None:
    graph = Graph()
    state = graph.placeholder("state")
    rows = graph.call_function(torch.ops.aten.neg.default, (state,))
    graph.call_function(WRITE_FIRST, (rows, state, 0))
    graph.output((rows,))
    with pytest.raises(AssertionError, match="depends on itself"):
        _order_writes(graph)
