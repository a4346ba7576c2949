"""What lowering to XNNPACK can leave out: passes and a decomposition that change nothing.

Before it serialises a delegate, XNNPACK's back end runs 17 passes, and after each the delegate's whole graph is
re-traced on fake tensors: four fifths of the time that lowering Gemma 3 270M took. Most of them look for operators that
no decoder has. A pass that finds nothing to do is left out; the file stays the same to the byte (a test compares).

And where a partitioner may refuse operators that it asked to keep whole, every program is decomposed three times
instead of twice, once to find out.
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
from torch.export import ExportedProgram
from torch.fx import Node

TRIGGERS: dict[str, tuple[str, ...]] = {
    "ConvertToUpsampleBilinear2d": ("upsample",),
    "ConvertToSDPAPass": ("scaled_dot_product",),
    "FuseBatchNormPass": ("batch_norm",),
    "DecomposeBatchNorm": ("batch_norm",),
    "FuseActivationPass": ("relu", "hardtanh"),
    "RemoveGetItemPass": ("max_pool", "max.dim"),
    "RemoveRedundantCopyPass": ("_to_copy",),
    "InsertPadQDQPass": ("constant_pad",),
    "Conv1dUnsqueezePass": ("conv",),
    "PReLUReshapePass": ("prelu",),
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


def is_needed(name: str, operators: set[str]) -> bool:
    """Whether the pass called `name` may find something among `operators`."""
    triggers = TRIGGERS.get(name)
    return triggers is None or any(trigger in operator for trigger in triggers for operator in operators)


class WholeOperators(XnnpackPartitioner):
    """XNNPACK's own partitioner, which says so when it takes every operator that it wants kept whole."""

    def ops_to_not_decompose(
        self, ep: ExportedProgram
    ) -> tuple[list[torch._ops.OpOverload], Callable[[Node], bool] | None]:
        operators, takes = super().ops_to_not_decompose(ep)
        kept = [node for node in ep.graph.nodes if node.op == "call_function" and node.target in operators]
        return operators, None if takes is None or all(takes(node) for node in kept) else takes


@contextlib.contextmanager
def needed_passes_only() -> Iterator[None]:
    """XNNPACK's back end names its pass manager in one place; there `NeededPasses` stands for the length of a
    lowering."""
    with mock.patch.object(xnnpack_preprocess, "XNNPACKPassManager", NeededPasses):
        yield
