"""What lowering to XNNPACK can leave out: passes and a decomposition that change nothing.

Before it serialises a delegate, XNNPACK's back end runs 17 passes, and after each the delegate's whole graph is
re-traced on fake tensors: four fifths of the time that lowering Gemma 3 270M took. Most of them look for operators that
no decoder has. A pass that finds nothing to do is left out; the file stays the same to the byte (a test compares).

On the way to the edge dialect every method goes through seven passes that each re-trace it to look at one operator at a
time; one pass that asks all seven about every operator does the same. And every method is decomposed two or three
times, to make it functional, to find out what a partitioner keeps whole, and to do the rest; once is enough where the
partitioner takes all that it asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from executorch.backends.xnnpack import _passes as own
from executorch.backends.xnnpack import xnnpack_preprocess
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir.pass_base import ExportPass
from executorch.exir.passes.legalize_portable_dim_order_pass import LegalizePortableDimOrderPass
from executorch.exir.passes.memory_format_ops_pass import MemoryFormatOpsPass
from executorch.exir.passes.normalize_transpose_pass import NormalizeTransposePass
from executorch.exir.passes.remove_mixed_type_operators import RemoveMixedTypeOperators
from executorch.exir.passes.replace_aten_with_edge_pass import OpReplacePass
from executorch.exir.passes.replace_broken_ops_with_function_ops_pass import ReplaceBrokenOpsWithFunctionalOpsPass
from executorch.exir.passes.scalar_to_tensor_pass import ScalarToTensorPass
from executorch.exir.passes.sym_to_tensor_pass import SymToTensorPass
from executorch.exir.program import _program as edge_program
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult

TRIGGERS: dict[str, tuple[str, ...]] = {
    "ConvertToUpsampleBilinear2d": ("upsample",),
    "ConvertToLinearPass": ("aten.mm", "aten.addmm", "aten.bmm"),
    "ConvertToSDPAPass": ("scaled_dot_product",),
    "FuseBatchNormPass": ("batch_norm",),
    "DecomposeBatchNorm": ("batch_norm",),
    "FuseActivationPass": ("relu", "hardtanh"),
    "RemoveGetItemPass": ("max_pool", "max.dim"),
    "RemoveRedundantCopyPass": ("_to_copy",),
    "InsertPadQDQPass": ("constant_pad",),
    "Conv1dUnsqueezePass": ("conv",),
    "PReLUReshapePass": ("prelu",),
    "DimOrderOpsRevertPass": ("dim_order",),
    "ChannelsLastTaggedReshapePass": ("conv", "pool", "upsample", "batch_norm", "mean"),
}
"""The parts of operators' names without which a pass changes nothing; passes not listed run always."""
LARGEST_CONCATENATION = 5
"""More inputs than XNNPACK's largest concatenation takes are `DecomposeConcatenate`'s business."""


class NeededPasses(own.XNNPACKPassManager):
    """XNNPACK's own pass manager with the passes this graph has no use for left out."""

    def __init__(self, exported_program: ExportedProgram, passes: list[Callable[..., object]] | None = None) -> None:
        super().__init__(exported_program, passes)
        names = {str(node.target) for node in exported_program.graph.nodes if node.op == "call_function"}
        self.passes: list[Any] = [one for one in self.passes if is_needed(one.__name__, names)]
        nodes = exported_program.graph.nodes
        if not any("custom" in node.meta for node in nodes):
            self.passes = [one for one in self.passes if one.__name__ != "PropagateCustomMetaPass"]
        if not any("aten.cat" in str(node.target) and len(node.args[0]) > LARGEST_CONCATENATION for node in nodes):
            self.passes = [one for one in self.passes if one.__name__ != "DecomposeConcatenate"]
        # An operator on numbers alone, or on a tensor that is no input, is what `ConstPropPass` computes.
        if all(node.op in ("placeholder", "output") or node.all_input_nodes for node in nodes):
            self.passes = [one for one in self.passes if one.__name__ != "ConstPropPass"]


def is_needed(name: str, operators: set[str]) -> bool:
    """Whether the pass called `name` may find something among `operators`."""
    triggers = TRIGGERS.get(name)
    return triggers is None or any(trigger in operator for trigger in triggers for operator in operators)


class WholeOperators(XnnpackPartitioner):
    """XNNPACK's own partitioner, which says so when it takes every operator that it wants kept whole, and then has the
    program decomposed at once."""

    def ops_to_not_decompose(
        self, ep: ExportedProgram
    ) -> tuple[list[torch._ops.OpOverload], Callable[[Node], bool] | None]:
        operators, takes = super().ops_to_not_decompose(ep)
        kept = [node for node in ep.graph.nodes if node.op == "call_function" and node.target in operators]
        return operators, None if takes is None or all(takes(node) for node in kept) else takes

    def transform_for_pre_decomposition(self, exported_program: ExportedProgram) -> ExportedProgram:
        program = super().transform_for_pre_decomposition(exported_program)
        operators, takes = self.ops_to_not_decompose(program)
        # Around batched products one decomposition leaves other views than two do.
        batched = any(node.target is torch.ops.aten.bmm.default for node in program.graph.nodes)
        if takes is not None or batched:
            return program
        table = edge_program._default_decomposition_table()
        for operator in operators:
            table.pop(operator, None)
        done = program.run_decompositions(table)

        def nothing_left(more: dict[Any, Any]) -> ExportedProgram:
            left = {node.target for node in done.graph.nodes if node.target in more}
            assert left <= {torch.ops.aten.sym_size.int}, left  # which is in the table, and stays as it is
            return done

        done.run_decompositions = nothing_left
        return done


class AtenToEdge(
    NormalizeTransposePass, ReplaceBrokenOpsWithFunctionalOpsPass, ScalarToTensorPass, SymToTensorPass,
    RemoveMixedTypeOperators, OpReplacePass, MemoryFormatOpsPass,
):  # fmt: skip
    """Seven passes as one: each looks at an operator and hands it on by ``super().call_operator``, which here is the
    next of them, in the order in which they would run."""


class Unchanged(ExportPass):
    """Stands for a pass that `AtenToEdge` has done already."""

    def call(self, graph_module: GraphModule) -> PassResult:
        return PassResult(graph_module, False)


class LegalizeWhereNeeded(LegalizePortableDimOrderPass):
    """The pass, where the graph has an operator of those that it looks for."""

    def call(self, graph_module: GraphModule) -> PassResult:
        if not any(node.target in self._target_ops for node in graph_module.graph.nodes):
            return PassResult(graph_module, False)
        return super().call(graph_module)


def _merged_edge_passes(config: Any) -> tuple[list[Any], list[Any]]:
    """What ExecuTorch runs before operators become edge operators, and after."""
    before, after = _edge_passes(config)  # functions around the passes, some of them
    rest = [one for one in before if not isinstance(getattr(one, "__wrapped__", one), AtenToEdge.__bases__)]
    return [*rest, AtenToEdge()], after


_edge_passes = edge_program._get_aten_to_edge_passes


@contextlib.contextmanager
def needed_passes_only() -> Iterator[None]:
    """ExecuTorch and XNNPACK's back end name their passes in one place each; there ours stand for the length of a
    lowering."""
    with (
        mock.patch.object(xnnpack_preprocess, "XNNPACKPassManager", NeededPasses),
        mock.patch.object(edge_program, "_get_aten_to_edge_passes", _merged_edge_passes),
        mock.patch.object(edge_program, "OpReplacePass", Unchanged),
        mock.patch.object(edge_program, "MemoryFormatOpsPass", Unchanged),
        mock.patch.object(edge_program, "LegalizePortableDimOrderPass", LegalizeWhereNeeded),
    ):
        yield
