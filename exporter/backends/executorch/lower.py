"""Lower traced programs to one ExecuTorch `.pte` with a method each.

The caller owns the states: they are inputs, written in place, not outputs. Lowering adds write-back copies of whole
states and lists states among the outputs; `InPlaceStatePass` removes both.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
from executorch.exir.backend import utils
from executorch.exir.passes import MemoryPlanningPass, ToOutVarPass
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult

from exporter.backends.executorch.inputs import quantized_inputs_shared
from exporter.backends.executorch.means import means_as_products
from exporter.backends.executorch.share import share_equal_bytes
from exporter.machine import release_freed_memory
from exporter.tricks.deferred_code import deferred_code
from exporter.tricks.dependency_bits import dependency_bits
from exporter.tricks.merged_edge_passes import merged_edge_passes
from exporter.tricks.needed_dim_order_pass import needed_dim_order_pass
from exporter.tricks.needed_passes import needed_passes
from exporter.tricks.one_decomposition import one_decomposition
from exporter.tricks.shared_copies import shared_copies
from exporter.tricks.weights_on_disk import weights_on_disk


class InPlaceStatePass(ToOutVarPass):
    """Out-variant conversion that leaves every mutated input in the caller's memory."""

    def call(self, graph_module: GraphModule) -> PassResult:
        result = super().call(graph_module)
        assert result is not None
        graph = result.graph_module.graph
        for node in list(graph.nodes):
            if node.target is torch.ops.aten.copy_.default and _origin(node.args[1]) is node.args[0]:
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
        output = graph.output_node()
        # An input among the outputs would get fresh storage from the runtime, away from the caller's tensor.
        kept = [place for place, node in enumerate(output.args[0]) if not _is_state(node)]
        output.args = (tuple(output.args[0][place] for place in kept),)
        # Memory is planned for what the node's specs list, whether or not it is still returned.
        output.meta["spec"] = [output.meta["spec"][place] for place in kept]
        _order_writes(graph)
        while dead := [node for node in reversed(graph.nodes) if _is_dead_buffer(node)]:
            for node in dead:
                graph.erase_node(node)
        result.graph_module.recompile()
        return PassResult(result.graph_module, True)


def _is_state(node: Node) -> bool:
    """An input, or the result of a copy into an input."""
    copied = node.target is torch.ops.aten.copy_.default and node.args[0]
    return node.op == "placeholder" or (isinstance(copied, Node) and copied.op == "placeholder")


def _order_writes(graph: Graph) -> None:
    """Restore the order of every write among the reads of its tensor, which the partitioner may have changed.

    A write has no user, so a graph does not keep its order among the readers of the same tensor: XNNPACK's partitioner
    has scheduled a ring's read after it. By construction (`backends.executorch.cache`),
    `update_cache_with_indices` follows everything that reads its cache and `update_cache` precedes it. With these as
    dependencies the graph is sorted again; a node moves only where its dependencies make it.
    """
    needs = {node: list(node.all_input_nodes) for node in graph.nodes}
    for node in graph.nodes:
        name = str(node.target)
        if not name.startswith("llama.update_cache"):
            continue
        readers = [user for user in node.args[1].users if not str(user.target).startswith("llama.update_cache")]
        for reader in readers:
            first, then = (reader, node) if "with_indices" in name else (node, reader)
            needs[then].append(first)
    order: list[Node] = []
    done: dict[Node, bool] = {}

    def place(node: Node) -> None:
        if node not in done:
            done[node] = False
            for need in needs[node]:
                place(need)
            done[node] = True
            order.append(node)
        assert done[node], f"{node} depends on itself: a delegate holds both sides of a write"

    for node in list(graph.nodes):
        place(node)
    *body, output = order
    for node in body:
        output.prepend(node)


def _origin(node: Any) -> Any:
    """The node behind a chain of copies."""
    while node.op == "call_function" and node.target in COPIES:
        node = node.args[1] if len(node.args) > 1 else node.args[0]
    return node


COPIES = (torch.ops.aten.copy.default, torch.ops.aten.copy.out, torch.ops.aten.copy_.default)


def _forget_shapes(programs: Mapping[str, ExportedProgram]) -> None:
    """Empty torch's caches of shapes, whose keys hold arguments of calls: delegates, with all their weights."""
    FakeTensorMode.cache_clear()
    for program in programs.values():
        for node in program.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, FakeTensor) and value.fake_mode.shape_env is not None:
                value.fake_mode.shape_env.fake_tensor_cache.clear()


def _is_dead_buffer(node: Node) -> bool:
    is_buffer = node.target is torch.ops.aten.copy.out or "alloc" in str(node.target)
    return node.op == "call_function" and not node.users and is_buffer


TRICKS = (
    needed_passes,
    merged_edge_passes,
    needed_dim_order_pass,
    one_decomposition,
    deferred_code,
    dependency_bits,
    shared_copies,
)


@contextlib.contextmanager
def cheap(folder: Path) -> Iterator[None]:
    """Lowering costs less inside and writes the same; large weights wait in `folder`."""
    with contextlib.ExitStack() as stack:
        for trick in TRICKS:
            stack.enter_context(trick())
        stack.enter_context(weights_on_disk(folder))
        yield


def lower(programs: Mapping[str, ExportedProgram], path: Path) -> None:
    """Write to `path` a `.pte` with one method for each program, linear algebra delegated to XNNPACK.

    `programs` are changed on the way."""
    for program in programs.values():
        means_as_products(program)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder, quantized_inputs_shared(), cheap(Path(folder)):
        edge = to_edge_transform_and_lower(
            dict(programs),
            partitioner={name: [XnnpackPartitioner()] for name in programs},
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
        )
        utils.is_same_node.cache_clear()  # a cache of comparisons, which keeps every graph that was cut alive
        config = ExecutorchBackendConfig(
            to_out_var_pass=InPlaceStatePass(),
            memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False),
        )
        done = edge.to_executorch(config)
        del edge
        repeating = Path(folder) / path.name
        with repeating.open("wb") as file:
            done.write_to_file(file)
        del done
        _forget_shapes(programs)
        release_freed_memory()
        share_equal_bytes(repeating, path)
