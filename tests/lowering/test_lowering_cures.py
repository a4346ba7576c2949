"""What the lowering changes on the way to XNNPACK, and that it changes nothing else."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack._passes import XNNPACKPassManager
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir.backend import utils
from executorch.exir.backend.canonical_partitioners import group_partitioner
from recipes import quantize_by
from tiny_models import GLOBAL, SLIDING, decoder_of, model, states_of
from torch.export import Dim, export

from exporter.backends.executorch import frugal, partition
from exporter.backends.executorch import lower as lowering
from exporter.backends.executorch.file import read_pte
from exporter.backends.executorch.inputs import quantized_inputs_shared
from exporter.backends.executorch.lower import lower
from exporter.backends.executorch.means import means_as_products
from exporter.backends.executorch.passes import (
    LARGEST_CONCATENATION,
    TRIGGERS,
    NeededPasses,
    WholeOperators,
    is_needed,
)
from exporter.backends.executorch.runtime import PteProgram
from exporter.programs import Limits, trace
from exporter.spec import PROGRAMS, QuantizationSpec

LIMITS = Limits(max_context_length=64, max_prefill_chunk=32)


class Means(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        squares = x * x
        return squares.mean(-1, keepdim=True), squares.mean(2, keepdim=True), x.mean(-1), x.mean((1, 2), keepdim=True)


def test_a_mean_over_the_last_axis_becomes_a_product_and_others_stay() -> None:
    x = torch.randn(1, 3, 20, generator=torch.Generator().manual_seed(0))
    program = export(Means(), (x,), dynamic_shapes=({1: Dim("q", min=2, max=8)},))
    means_as_products(program)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count("aten.linear.default") == 2 and targets.count("aten.mean.dim") == 2
    assert [name for name in program.constants if "mean_of" in name] == ["mean_of_20"]
    for length in (2, 8):
        x = torch.randn(1, length, 20, generator=torch.Generator().manual_seed(length))
        for got, wanted in zip(program.module()(x), Means()(x), strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=3e-7)


class Sums(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        twice = (x * 5).mean(-1, keepdim=True)
        return (
            x.mean(-1, keepdim=True) + 0.5, (x * 2).mean(-1, keepdim=True) + 0.5, (x * 3).mean(-1, keepdim=True) + 2,
            torch.add((x * 4).mean(-1, keepdim=True), 1.0, alpha=3), twice + 0.25, twice * 2,
            (x * 6).mean(-1, keepdim=True) + x,
        )  # fmt: skip


def test_a_number_added_to_a_mean_is_the_products_bias() -> None:
    """Numbers alone, and of a mean that nothing else reads."""
    x = torch.randn(1, 3, 20, generator=torch.Generator().manual_seed(0))
    program = export(Sums(), (x,))
    means_as_products(program)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count("aten.linear.default") == 6 and targets.count("aten.add.Tensor") == 3
    assert [float(program.constants[name]) for name in program.constants if "added" in name] == [0.5, 2.0]
    for got, wanted in zip(program.module()(x), Sums()(x), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)


def test_linears_of_one_input_round_it_once_to_the_same_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    decoder = decoder_of(model(SLIDING, GLOBAL), kernels="executorch", context=64)
    quantize_by(QuantizationSpec(linear="int8"), decoder)
    delegates, results = [], []
    for name, context in (("shared", quantized_inputs_shared), ("each", contextlib.nullcontext)):
        monkeypatch.setattr(lowering, "quantized_inputs_shared", context)
        path = tmp_path / f"{name}.pte"
        lower({name: trace(decoder, kind, LIMITS) for name, kind in PROGRAMS.items()}, path)
        plans = read_pte(path.read_bytes()).plans
        delegates.append({method: [d.nodes or 0 for d in plans[method].delegates] for method in PROGRAMS})
        states = states_of(decoder, rows=64)
        program, ids = PteProgram(path), torch.arange(12)[None]
        logits = [
            program.run("prefill", ids, ids, states),
            program.run("main", ids[:, :1], torch.arange(13)[None], states),
        ]
        results.append([*logits, *states])
        del program
    shared, each = delegates
    assert {method: len(found) for method, found in shared.items()} == {m: len(found) for m, found in each.items()}
    # Of two layers' q, k, v, gate and up, where they are in one delegate; in prefill a chunk's rows come between.
    assert sum(each["main"]) - sum(shared["main"]) == 2 * (2 + 1)
    assert 2 <= sum(each["prefill"]) - sum(shared["prefill"]) <= 2 * (2 + 1)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


def test_no_mean_is_left_to_cut_the_file(tmp_path: Path) -> None:
    decoder = decoder_of(model(*[SLIDING] * 3, GLOBAL), kernels="executorch", context=64)
    lower({name: trace(decoder, kind, LIMITS) for name, kind in PROGRAMS.items()}, tmp_path / "model.pte")
    for plan in read_pte((tmp_path / "model.pte").read_bytes()).plans.values():
        assert "aten::mean.out" not in plan.operators_called()


@pytest.mark.parametrize(
    ("linear", "kernels", "dtype"), [("none", "executorch", "int8"), ("int8", "executorch", "float32"),
                                     ("none", "stock", "float32")],
)  # fmt: skip
def test_leaving_passes_out_changes_no_byte(
    linear: Any, kernels: str, dtype: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    decoder = decoder_of(model(SLIDING, GLOBAL), kernels=kernels, dtype=dtype, context=64)
    quantize_by(QuantizationSpec(linear=linear), decoder)

    def data() -> bytes:
        lower({name: trace(decoder, kind, LIMITS) for name, kind in PROGRAMS.items()}, tmp_path / "model.pte")
        return (tmp_path / "model.pte").read_bytes()

    ran: list[int] = []
    original = NeededPasses.transform

    def counted(self: NeededPasses) -> Any:
        ran.append(len(self.passes))
        return original(self)

    monkeypatch.setattr(NeededPasses, "transform", counted)
    few = data()
    assert ran and max(ran) < 8  # of 17
    monkeypatch.setattr(lowering, "needed_passes_only", contextlib.nullcontext)
    monkeypatch.setattr(lowering, "WholeOperators", XnnpackPartitioner)
    assert data() == few


@pytest.mark.parametrize("linear", ["none", "int8"])
def test_sharing_weights_changes_no_byte(linear: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every tensor of more than 256 bytes shared and put on disk, and none."""
    decoder = decoder_of(model(SLIDING, GLOBAL), kernels="executorch", context=64)
    quantize_by(QuantizationSpec(linear=linear), decoder)

    def data() -> bytes:
        lower({name: trace(decoder, kind, LIMITS) for name, kind in PROGRAMS.items()}, tmp_path / "model.pte")
        return (tmp_path / "model.pte").read_bytes()

    monkeypatch.setattr(frugal, "MIN_BYTES", 256)
    written: list[str] = []
    original = frugal.StoreOnDisk.add_named_data

    def counted(self: frugal.StoreOnDisk, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        written.extend(path.name for path in self.folder.iterdir())

    monkeypatch.setattr(frugal.StoreOnDisk, "add_named_data", counted)
    shared = data()
    assert len(set(written)) > 10, "weights went to disk"
    monkeypatch.setattr(frugal, "MIN_BYTES", 2**40)
    assert data() == shared
    assert [path.name for path in tmp_path.iterdir()] == ["model.pte"]


def test_a_copy_shares_memory_inside_only(tmp_path: Path) -> None:
    large, small = torch.zeros(frugal.MIN_BYTES, dtype=torch.int8), torch.zeros(2)
    weight = torch.nn.Parameter(torch.zeros(frugal.MIN_BYTES), requires_grad=False)

    def shared() -> list[bool]:
        copies = copy.deepcopy([large, weight, small])
        assert [type(one) for one in copies] == [torch.Tensor, torch.nn.Parameter, torch.Tensor]
        return [a.data_ptr() == b.data_ptr() for a, b in zip(copies, (large, weight, small), strict=True)]

    with frugal.weights_held_once(tmp_path):
        assert shared() == [True, True, False]
    assert shared() == [False] * 3


def test_bits_say_what_the_sets_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of every node of both programs, and of every pair of partitions that may be merged."""
    decoder = decoder_of(model(SLIDING, GLOBAL), kernels="executorch", context=64)
    quantize_by(QuantizationSpec(linear="int8"), decoder)
    sets, answers = group_partitioner._DependencyViewer, []
    by_bits = partition.Partitioner._can_merge_partitions

    def both(self: partition.Partitioner, p1: Any, p2: Any, partitions_by_id: Any) -> bool:
        bits, answer = self.dependency_viewer, by_bits(self, p1, p2, partitions_by_id)
        self.dependency_viewer = sets(self.graph_module)
        wanted = group_partitioner.GroupBasedPartitioner._can_merge_partitions(self, p1, p2, partitions_by_id)
        if not answers:
            for node in self.graph_module.graph.nodes:
                assert bits.downstreams_of(node) == self.dependency_viewer.downstreams_of(node)
        self.dependency_viewer = bits
        answers.append((answer, wanted))
        return answer

    monkeypatch.setattr(partition.Partitioner, "_can_merge_partitions", both)
    lower({name: trace(decoder, kind, LIMITS) for name, kind in PROGRAMS.items()}, tmp_path / "model.pte")
    assert {(True, True), (False, False)} == set(answers)
    assert utils.is_same_node.cache_info().currsize == 0, "a cache keeps the graphs"


def test_a_pass_whose_operator_is_there_is_kept() -> None:
    names = {one.__name__ for one in XNNPACKPassManager(None).passes}  # type: ignore[arg-type]
    assert names >= TRIGGERS.keys(), "a pass named here is gone from ExecuTorch"
    assert is_needed("Conv1dUnsqueezePass", {"aten.convolution.default"})
    assert not is_needed("Conv1dUnsqueezePass", {"aten.linear.default"})
    assert not is_needed("ConvertToLinearPass", {"aten.linear.default"})
    for product in ("mm", "addmm", "bmm"):
        assert is_needed("ConvertToLinearPass", {f"aten.{product}.default"})
    assert is_needed("XNNPACKRemoveCloneOpsTransform", {"aten.linear.default"})
    x = torch.ones(1, 2)
    for count in (LARGEST_CONCATENATION, LARGEST_CONCATENATION + 1):

        class Many(torch.nn.Module):
            def forward(self, x: torch.Tensor, count: int = count) -> torch.Tensor:
                return torch.cat([x * k for k in range(count)])

        kept = {one.__name__ for one in NeededPasses(export(Many(), (x,))).passes}
        assert ("DecomposeConcatenate" in kept) == (count > LARGEST_CONCATENATION)


def test_what_takes_no_input_is_computed() -> None:
    """A constant of numbers alone, or one that the graph module holds; not what an input goes into."""

    class Sum(torch.nn.Module):
        def __init__(self, term: Any) -> None:
            super().__init__()
            self.term = term

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.term(x)

    x = torch.ones(2, 3)
    for term, needed in ((torch.exp, False), (lambda _: torch.full((2, 3), 0.5), True)):
        program = export(Sum(term), (x,))
        assert ("ConstPropPass" in {one.__name__ for one in NeededPasses(program).passes}) == needed
    program.graph_module.held = torch.nn.Parameter(x)
    graph = program.graph
    for node in [node for node in graph.nodes if node.op == "call_function" and not node.all_input_nodes]:
        with graph.inserting_before(node):
            node.replace_all_uses_with(graph.get_attr("held"))
        graph.erase_node(node)
    assert "ConstPropPass" in {one.__name__ for one in NeededPasses(program).passes}


def test_the_filter_stays_where_a_linear_cannot_be_taken() -> None:
    class Products(torch.nn.Module):
        def __init__(self, constant: bool) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4, 3), requires_grad=False)
            self.constant = constant

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, self.weight if self.constant else self.weight * x.sum())

    for constant in (True, False):
        program = export(Products(constant), (torch.ones(2, 3),))
        operators, takes = WholeOperators().ops_to_not_decompose(program)
        assert torch.ops.aten.linear.default in operators
        assert (takes is None) == constant
