"""Cost tricks of an export: what each does, that none changes a byte, and that an export does without."""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack._passes import XNNPACKPassManager
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge
from executorch.exir.backend import utils
from executorch.exir.backend.canonical_partitioners import group_partitioner
from recipes import quantize_by
from tiny_models import GLOBAL, SLIDING, decoder_of, model
from torch.export import export

from exporter import pipeline
from exporter.backends.executorch.lower import lower
from exporter.bundle import read_bundle
from exporter.config import load_config
from exporter.programs import Limits, trace
from exporter.progress import Progress
from exporter.spec import PROGRAMS, QuantizationSpec
from exporter.tricks import (
    base,
    dependency_bits,
    needed_dim_order_pass,
    needed_passes,
    shared_copies,
    weights_on_disk,
)
from exporter.tricks.base import Trick

LIMITS = Limits(max_context_length=64, max_prefill_chunk=32)
OF_AN_EXPORT = {trick.name for trick in importlib.import_module("exporter.backends.executorch.lower").TRICKS} | {
    "weights_on_disk", "rare_collections", "packed_weights"
}  # fmt: skip


@pytest.fixture
def written(tmp_path: Path) -> Any:
    """Lowers a decoder and returns the file's bytes; nothing else is left in the folder."""

    def data(decoder: Any) -> bytes:
        path = tmp_path / "model.pte"
        lower({method: trace(decoder, PROGRAMS[method], LIMITS) for method in PROGRAMS}, path)
        assert list(tmp_path.iterdir()) == [path]
        return path.read_bytes()

    return data


def counting(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[Any]:
    """What every call of a function of a trick returns from now on."""
    own, returned = getattr(module, name), []

    def counted(*arguments: Any) -> Any:
        returned.append(own(*arguments))
        return returned[-1]

    monkeypatch.setattr(module, name, counted)
    return returned


@pytest.mark.parametrize(("linear", "kernels", "dtype"), [("int8", "executorch", "int8"), ("none", "stock", "float32")])
def test_no_trick_changes_a_byte(
    linear: Any, kernels: str, dtype: Any, written: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all of them, every tensor of more than 256 bytes shared and put on disk, and with none."""
    decoder = decoder_of(model(SLIDING, GLOBAL), kernels=kernels, dtype=dtype, context=64)
    quantize_by(QuantizationSpec(linear=linear), decoder)
    monkeypatch.setattr(shared_copies, "MIN_BYTES", 256)
    monkeypatch.setattr(weights_on_disk, "MIN_BYTES", 256)
    passes = counting(monkeypatch, needed_passes, "needed")
    stored = counting(monkeypatch, weights_on_disk, "kept")
    with_all = written(decoder)
    assert passes and max(map(len, passes)) < 8  # of 17
    assert len({one for one in stored if not isinstance(one, bytes)}) > 10, "weights went to disk"
    counts = len(passes), len(stored)
    monkeypatch.setattr(Trick, "applies", lambda self: False)
    assert written(decoder) == with_all
    assert counts == (len(passes), len(stored))


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every library is another version than any trick is made for."""
    monkeypatch.setattr(base, "installed", lambda what: "0")
    monkeypatch.setattr(base, "_said", set())
    yield


@pytest.mark.usefixtures("elsewhere")
def test_an_export_on_other_versions_is_the_same_and_names_each_trick_once(
    tiny_bundle: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a float model; what shares inputs changes a quantised one's program, and is left out here as well."""
    with caplog.at_level(logging.WARNING, logger="exporter.tricks"):
        pipeline.export(load_config(tiny_bundle.with_suffix(".yaml")), tmp_path / "out", Progress.silent())
    assert (tmp_path / "out" / "model.pte").read_bytes() == (tiny_bundle / "model.pte").read_bytes()
    ours, theirs = (read_bundle(folder).manifest for folder in (tmp_path / "out", tiny_bundle))
    assert ours.verification == theirs.verification and ours.programs == theirs.programs
    said = sorted(record.getMessage().split(" is left out")[0] for record in caplog.records)
    assert said == sorted([*(f"trick {name}" for name in OF_AN_EXPORT), "sharing of quantised inputs"])


def test_a_copy_shares_memory_inside_only() -> None:
    large, small = torch.zeros(shared_copies.MIN_BYTES, dtype=torch.int8), torch.zeros(2)
    weight = torch.nn.Parameter(torch.zeros(shared_copies.MIN_BYTES), requires_grad=False)

    def shared() -> list[bool]:
        copies = copy.deepcopy([large, weight, small])
        assert [type(one) for one in copies] == [torch.Tensor, torch.nn.Parameter, torch.Tensor]
        return [a.data_ptr() == b.data_ptr() for a, b in zip(copies, (large, weight, small), strict=True)]

    with shared_copies.shared_copies():
        assert shared() == [True, True, False]
        first, second = copy.deepcopy([weight, weight])
        assert first is second
    assert shared() == [False] * 3


def test_bits_say_what_the_sets_said(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every node of both programs, and of every pair of partitions that may be merged."""
    decoder = decoder_of(model(SLIDING, GLOBAL), kernels="executorch", context=64)
    quantize_by(QuantizationSpec(linear="int8"), decoder)
    sets, by_sets, by_bits, answers = (
        group_partitioner._DependencyViewer, group_partitioner.GroupBasedPartitioner._can_merge_partitions,
        dependency_bits.can_merge, [],
    )  # fmt: skip

    def both(self: Any, p1: Any, p2: Any, partitions_by_id: Any) -> bool:
        bits, answer = self.dependency_viewer, by_bits(self, p1, p2, partitions_by_id)
        self.dependency_viewer = sets(self.graph_module)
        wanted = by_sets(self, p1, p2, partitions_by_id)
        if not answers:
            for node in self.graph_module.graph.nodes:
                assert bits.downstreams_of(node) == self.dependency_viewer.downstreams_of(node)
        self.dependency_viewer = bits
        answers.append((answer, wanted))
        return answer

    monkeypatch.setattr(dependency_bits, "can_merge", both)
    written(decoder)
    assert {(True, True), (False, False)} == set(answers)
    assert utils.is_same_node.cache_info().currsize == 0, "a cache keeps the graphs"


def test_a_pass_whose_operator_is_there_is_kept() -> None:
    passes = XNNPACKPassManager(None).passes  # type: ignore[arg-type]
    assert {one.__name__ for one in passes} >= needed_passes.TRIGGERS.keys(), "a pass named here is gone"
    triggered = needed_passes.is_triggered
    assert triggered("Conv1dUnsqueezePass", {"aten.convolution.default"})
    assert not triggered("Conv1dUnsqueezePass", {"aten.linear.default"})
    assert not triggered("ConvertToLinearPass", {"aten.linear.default"})
    for product in ("mm", "addmm", "bmm"):
        assert triggered("ConvertToLinearPass", {f"aten.{product}.default"})
    assert triggered("XNNPACKRemoveCloneOpsTransform", {"aten.linear.default"})
    for count in (needed_passes.LARGEST_CONCATENATION, needed_passes.LARGEST_CONCATENATION + 1):

        class Many(torch.nn.Module):
            def forward(self, x: torch.Tensor, count: int = count) -> torch.Tensor:
                return torch.cat([x * k for k in range(count)])

        kept = needed_passes.needed(passes, export(Many(), (torch.ones(1, 2),)))
        assert ("DecomposeConcatenate" in {one.__name__ for one in kept}) == (
            count > needed_passes.LARGEST_CONCATENATION
        )


def test_what_takes_no_input_is_computed() -> None:
    """A constant of numbers alone, or one that the graph module holds; not what an input goes into."""

    class Sum(torch.nn.Module):
        def __init__(self, term: Any) -> None:
            super().__init__()
            self.term = term

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.term(x)

    def folds(program: Any) -> bool:
        passes = XNNPACKPassManager(program).passes
        return "ConstPropPass" in {one.__name__ for one in needed_passes.needed(passes, program)}

    x = torch.ones(2, 3)
    for term, needed in ((torch.exp, False), (lambda _: torch.full((2, 3), 0.5), True)):
        program = export(Sum(term), (x,))
        assert folds(program) == needed
    program.graph_module.held = torch.nn.Parameter(x)
    graph = program.graph
    for node in [node for node in graph.nodes if node.op == "call_function" and not node.all_input_nodes]:
        with graph.inserting_before(node):
            node.replace_all_uses_with(graph.get_attr("held"))
        graph.erase_node(node)
    assert folds(program)


def test_an_operator_that_wants_the_usual_layout_is_looked_at() -> None:
    """A mean of an image whose channels are last, which stays outside of delegates."""

    class Mean(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean(1)

    def operators(x: torch.Tensor) -> list[str]:
        program = to_edge(export(Mean(), (x,))).to_executorch().exported_program()
        return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]

    plain = torch.ones(2, 3, 4, 5)
    last = plain.to(memory_format=torch.channels_last)
    alone = operators(plain), operators(last)
    with needed_dim_order_pass.needed_dim_order_pass():
        assert (operators(plain), operators(last)) == alone
    assert sum("_to_dim_order_copy" in one for one in alone[1]) > sum("_to_dim_order_copy" in one for one in alone[0])


def test_the_filter_stays_where_a_linear_cannot_be_taken() -> None:
    class Products(torch.nn.Module):
        def __init__(self, constant: bool) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4, 3), requires_grad=False)
            self.constant = constant

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, self.weight if self.constant else self.weight * x.sum())

    from exporter.tricks.one_decomposition import one_decomposition

    for constant in (True, False):
        program = export(Products(constant), (torch.ones(2, 3),))
        with one_decomposition():
            operators, takes = XnnpackPartitioner().ops_to_not_decompose(program)
        assert torch.ops.aten.linear.default in operators
        assert (takes is None) == constant
        assert XnnpackPartitioner().ops_to_not_decompose(program)[1] is not None
