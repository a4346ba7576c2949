"""One quantised input for all the linears of a delegate that read it.

Every quantised linear rounds its own input, so q, k and v round the same row three times, and gate and up twice. It is
done inside delegates, after partitioning: a graph in which linears share an input falls into more of them, and a
partitioner may not change the graph that it cuts. No cost trick, for it changes the file; not to its results.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

from executorch.backends.xnnpack.xnnpack_preprocess import XnnpackBackend
from executorch.exir.dialects._ops import ops as exir_ops
from torch.export import ExportedProgram

from exporter.tricks.base import LOWERING, fits, patched

QD = exir_ops.edge.quantized_decomposed
STEPS = (
    QD.choose_qparams_per_token_asymmetric.default,
    operator.getitem,
    QD.quantize_per_token.default,
    QD.dequantize_per_token.default,
)


def share_quantized_inputs(program: ExportedProgram) -> None:
    """Make equal steps over equal arguments one, in place."""
    graph = program.graph_module.graph
    first: dict[Any, Any] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in STEPS:
            continue
        same = first.setdefault((node.target, node.args, tuple(node.kwargs.items())), node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    program.graph_module.recompile()


@contextlib.contextmanager
def quantized_inputs_shared() -> Iterator[None]:
    """XNNPACK's back end does so to every delegate in here; on versions that this is not made for every linear rounds
    for itself, to the same numbers."""
    if not fits("sharing of quantised inputs", LOWERING, "the program has more operators, with the same results"):
        yield
        return
    own = XnnpackBackend.preprocess

    def preprocess(program: ExportedProgram, specs: Any) -> Any:
        share_quantized_inputs(program)
        return own(program, specs)

    with patched(XnnpackBackend, "preprocess", staticmethod(preprocess)):
        yield
