"""A program is decomposed once.

Every method is decomposed two or three times: to make it functional, to find out what a partitioner keeps whole, and to
do the rest. Once is enough where the partitioner takes all that it asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from exporter.tricks.base import LOWERING, patched, trick

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram
    from torch.fx import Node

Kept = tuple[list["torch._ops.OpOverload"], Callable[["Node"], bool] | None]


@trick(saves="23 of 139 CPU s of an export", made_for=LOWERING)
def one_decomposition() -> Iterator[None]:
    """XNNPACK's partitioner says so when it takes every operator that it wants kept whole, and then has the program
    decomposed at once."""
    import torch
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir.program import _program

    keeping, transforming = XnnpackPartitioner.ops_to_not_decompose, XnnpackPartitioner.transform_for_pre_decomposition

    def ops_to_not_decompose(self: Any, ep: ExportedProgram) -> Kept:
        return without_idle_filter(ep, keeping(self, ep))

    def transform_for_pre_decomposition(self: Any, exported_program: ExportedProgram) -> ExportedProgram:
        program = transforming(self, exported_program)
        operators, takes = self.ops_to_not_decompose(program)
        # Around batched products one decomposition leaves other views than two do.
        batched = any(node.target is torch.ops.aten.bmm.default for node in program.graph.nodes)
        if takes is not None or batched:
            return program
        table = _program._default_decomposition_table()
        for operator in operators:
            table.pop(operator, None)
        done = program.run_decompositions(table)

        def nothing_left(more: dict[Any, Any]) -> ExportedProgram:
            left = {node.target for node in done.graph.nodes if node.target in more}
            assert left <= {torch.ops.aten.sym_size.int}, left  # which is in the table, and stays as it is
            return done

        done.run_decompositions = nothing_left
        return done

    with (
        patched(XnnpackPartitioner, "ops_to_not_decompose", ops_to_not_decompose),
        patched(XnnpackPartitioner, "transform_for_pre_decomposition", transform_for_pre_decomposition),
    ):
        yield


def without_idle_filter(program: ExportedProgram, kept: Kept) -> Kept:
    """The operators that a partitioner wants kept whole, with its filter only if that says no to one of them."""
    operators, takes = kept
    nodes = [node for node in program.graph.nodes if node.op == "call_function" and node.target in operators]
    return operators, None if takes is None or all(takes(node) for node in nodes) else takes
