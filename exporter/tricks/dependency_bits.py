"""Partitioning whose memory grows with the graph and not with its square.

Before it cuts delegates out, ExecuTorch lists for every node all those downstream and upstream of it, in sets, twice.
Who is downstream of whom is a bit of an integer here, and whether merging two partitions would close a cycle is an
"and" of two of them. The partitions are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from exporter.tricks.base import LOWERING, patched, trick

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node


@trick(saves="1.3 GB while a model of 36 layers is lowered", made_for=LOWERING)
def dependency_bits() -> Iterator[None]:
    """Programs are partitioned so inside."""
    from executorch.exir.backend.canonical_partitioners import group_partitioner
    from torch.fx.passes.infra import partitioner

    with (
        patched(partitioner, "_DependencyViewer", Downstream),
        patched(group_partitioner, "_DependencyViewer", Downstream),
        patched(group_partitioner.GroupBasedPartitioner, "_can_merge_partitions", can_merge),
    ):
        yield


class Downstream:
    """Stands for the dependency viewers of torch and ExecuTorch."""

    def __init__(self, graph_module: GraphModule) -> None:
        self.nodes = list(graph_module.graph.nodes)
        self.bit = {node: 1 << place for place, node in enumerate(self.nodes)}
        self.bits: dict[Node, int] = {}
        for node in reversed(self.nodes):
            self.bits[node] = self.union(node.users)
            for user in node.users:
                self.bits[node] |= self.bits[user]

    def union(self, nodes: Iterable[Node]) -> int:
        """The bits of `nodes` themselves."""
        found = 0
        for node in nodes:
            found |= self.bit.get(node, 0)
        return found

    def downstreams_of(self, node: Node) -> set[Node]:
        """All nodes that depend on `node`."""
        bits = self.bits.get(node, 0)
        return {other for other in self.nodes if self.bit[other] & bits}


def can_merge(self: Any, p1: Any, p2: Any, partitions_by_id: Any) -> bool:
    """`GroupBasedPartitioner._can_merge_partitions`, which asks a `Downstream` in its own terms."""
    from torch.fx.passes.utils.fuser_utils import validate_partition

    combined = {*partitions_by_id[p1].nodes, *partitions_by_id[p2].nodes}
    own, downstream = self.dependency_viewer.union(combined), self.dependency_viewer.bits
    users = {user for node in combined for user in node.users if user not in combined}
    if any(downstream.get(user, 0) & own for user in users):
        return False
    return bool(validate_partition(list(combined)))
