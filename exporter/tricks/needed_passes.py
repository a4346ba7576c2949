"""XNNPACK's back end runs the passes that find something to do, and no others.

Before it serialises a delegate it runs 17 passes, and after each the delegate's whole graph is re-traced on fake
tensors. Most of them look for operators that no decoder has; one or two are left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from exporter.tricks.base import LOWERING, patched, trick

if TYPE_CHECKING:
    from torch.export import ExportedProgram

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


@trick(saves="58 of 175 CPU s of an export", made_for=LOWERING)
def needed_passes() -> Iterator[None]:
    """XNNPACK's pass manager leaves out what is not `needed`."""
    from executorch.backends.xnnpack import xnnpack_preprocess

    class NeededPasses(xnnpack_preprocess.XNNPACKPassManager):
        passes: list[Any]

        def transform(self) -> ExportedProgram:
            self.passes = needed(self.passes, self.exported_program)
            return super().transform()

    with patched(xnnpack_preprocess, "XNNPACKPassManager", NeededPasses):
        yield


def needed(passes: Sequence[Any], program: ExportedProgram) -> list[Any]:
    """Those of XNNPACK's `passes` that may find something in `program`."""
    nodes = list(program.graph.nodes)
    operators = {str(node.target) for node in nodes if node.op == "call_function"}
    idle = {name for name in TRIGGERS if not is_triggered(name, operators)}
    if not any("custom" in node.meta for node in nodes):
        idle.add("PropagateCustomMetaPass")
    if not any("aten.cat" in str(node.target) and len(node.args[0]) > LARGEST_CONCATENATION for node in nodes):
        idle.add("DecomposeConcatenate")
    # An operator on numbers alone, or on a tensor that is no input, is what `ConstPropPass` computes.
    if all(node.op in ("placeholder", "output") or node.all_input_nodes for node in nodes):
        idle.add("ConstPropPass")
    return [one for one in passes if one.__name__ not in idle]


def is_triggered(name: str, operators: set[str]) -> bool:
    """Whether the pass called `name` may find something among `operators`."""
    triggers = TRIGGERS.get(name)
    return triggers is None or any(trigger in operator for trigger in triggers for operator in operators)
