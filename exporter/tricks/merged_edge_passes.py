"""Seven passes on the way to the edge dialect are one.

Each of them re-traces a method to look at one operator at a time; one pass that asks all seven about every operator
does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from exporter.tricks.base import LOWERING, patched, trick

if TYPE_CHECKING:
    from torch.fx import GraphModule

Passes = tuple[list[Any], list[Any]]


@trick(saves="14 of 131 CPU s of an export", made_for=LOWERING)
def merged_edge_passes() -> Iterator[None]:
    """ExecuTorch names these passes in one place; there the merged one stands."""
    from executorch.exir.pass_base import ExportPass
    from executorch.exir.passes.memory_format_ops_pass import MemoryFormatOpsPass
    from executorch.exir.passes.normalize_transpose_pass import NormalizeTransposePass
    from executorch.exir.passes.remove_mixed_type_operators import RemoveMixedTypeOperators
    from executorch.exir.passes.replace_aten_with_edge_pass import OpReplacePass
    from executorch.exir.passes.replace_broken_ops_with_function_ops_pass import ReplaceBrokenOpsWithFunctionalOpsPass
    from executorch.exir.passes.scalar_to_tensor_pass import ScalarToTensorPass
    from executorch.exir.passes.sym_to_tensor_pass import SymToTensorPass
    from executorch.exir.program import _program
    from torch.fx.passes.infra.pass_base import PassResult

    class AtenToEdge(
        NormalizeTransposePass, ReplaceBrokenOpsWithFunctionalOpsPass, ScalarToTensorPass, SymToTensorPass,
        RemoveMixedTypeOperators, OpReplacePass, MemoryFormatOpsPass,
    ):  # fmt: skip
        """Each hands an operator on by ``super().call_operator``, which here is the next of them, in the order in which
        they would run."""

    class Done(ExportPass):
        """Stands for a pass that `AtenToEdge` has done already."""

        def call(self, graph_module: GraphModule) -> PassResult:
            return PassResult(graph_module, False)

    def merging(own: Callable[[Any], Passes]) -> Callable[[Any], Passes]:
        def edge_passes(config: Any) -> Passes:
            """What runs before operators become edge operators, and after."""
            before, after = own(config)  # functions around the passes, some of them
            rest = [one for one in before if not isinstance(getattr(one, "__wrapped__", one), AtenToEdge.__bases__)]
            return [*rest, AtenToEdge()], after

        return edge_passes

    with (
        patched(_program, "_get_aten_to_edge_passes", merging(_program._get_aten_to_edge_passes)),
        patched(_program, "OpReplacePass", Done),
        patched(_program, "MemoryFormatOpsPass", Done),
    ):
        yield
