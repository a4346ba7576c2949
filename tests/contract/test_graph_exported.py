"""Exported programs: a good one passes every check, and each mutant fails the check made for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from programs_for_checks import CONTRACTS, STATES, trace
from torch.export import Dim, export

from exporter import programs
from exporter.backends.executorch.assertion import assert_graph_contract
from exporter.errors import GraphContractError
from exporter.graph import ProgramContract, Provenance, check_exported, refuse_failed
from exporter.graph.checks_flow import access_order
from exporter.graph.flow import Flow, Step, Value
from exporter.graph.fx_flow import flow_of
from exporter.graph.index_proof import Lengths, expected_rows, played_lengths, sample_lengths
from exporter.graph.provenance import Trace
from exporter.spec import KINDS, PREFILL, MethodSpec, StateSpec, TensorSpec
from exporter.spec.checks import TRACED_CHECKS

MUTANTS = [
    ("prefill", "data_index", True, "ring_write_index_from_shapes"),
    ("prefill", "data_index", False, "ring_write_index_from_shapes"),
    ("main", "data_index", True, "ring_write_index_from_shapes"),
    ("prefill", "data_index_full", True, "full_write_index_from_shapes"),
    ("main", "wrong_slot", True, "write_index_is_definition"),
    ("prefill", "wrong_slot", True, "writes_land_on_their_rows"),
    ("main", "wrong_slot", False, "writes_land_on_their_rows"),
    ("prefill", "write_first", True, "ring_reads_before_write"),
    ("prefill", "write_first", False, "ring_reads_before_write"),
    ("main", "read_first", True, "ring_writes_before_read"),
    ("main", "read_first", False, "ring_writes_before_read"),
    ("prefill", "full_read_first", True, "full_writes_before_read"),
    ("main", "full_read_first", False, "full_writes_before_read"),
    ("prefill", "extra_mutation", True, "mutated_inputs_exactly_states"),
    ("main", "unwritten", True, "mutated_inputs_exactly_states"),
    ("main", "returned_state", True, "mutated_inputs_exactly_states"),
    ("prefill", "tensor_remainder", True, "no_tensor_remainder"),
    ("prefill", "infinite_mask", False, "finite_constants"),
    ("main", "infinite_weight", True, "finite_constants"),
    ("prefill", "item_on_data", True, "no_scalar_read_from_data"),
    ("main", "item_on_weight", True, "no_scalar_read_from_data"),
    ("prefill", "fixed_query", True, "dynamic_ranges"),
    ("prefill", "short_sequence", True, "dynamic_ranges"),
    ("prefill", "fixed_rows", False, "dynamic_ranges"),
    ("main", "even_lengths", True, "dynamic_ranges"),
    ("prefill", "all_logits", True, "last_token_logits_only"),
    ("prefill", "late_slice", True, "last_token_logits_only"),
]
CHECKS = {
    "ring_write_index_from_shapes", "full_write_index_from_shapes", "mutated_inputs_exactly_states",
    "no_scalar_read_from_data", "no_tensor_remainder", "write_index_is_definition", "writes_land_on_their_rows",
    "finite_constants", "dynamic_ranges", "last_token_logits_only", "full_writes_before_read",
    "conv_reads_before_write",
}  # fmt: skip


@pytest.mark.parametrize("custom", [True, False], ids=["operators", "aten"])
@pytest.mark.parametrize("method", ["prefill", "main"])
def test_a_good_program_passes_every_check(method: str, custom: bool) -> None:
    results = check_exported(trace(method, custom=custom), CONTRACTS[method])
    order = "ring_writes_before_read" if method == "main" else "ring_reads_before_write"
    assert {r.name for r in results} == CHECKS | {order} <= set(TRACED_CHECKS)
    assert [r for r in results if not r.passed] == []
    assert all(r.evidence and r.program == method for r in results)
    refuse_failed(results)


@pytest.mark.parametrize(("method", "fault", "custom", "check"), MUTANTS)
def test_a_mutant_fails_its_check(method: str, fault: str, custom: bool, check: str) -> None:
    results = {r.name: r for r in check_exported(trace(method, fault, custom=custom), CONTRACTS[method])}
    assert not results[check].passed
    with pytest.raises(GraphContractError, match=check):
        refuse_failed(list(results.values()))


def test_each_fault_fails_nothing_it_does_not_touch() -> None:
    failed = {r.name for r in check_exported(trace("prefill", "infinite_mask"), CONTRACTS["prefill"]) if not r.passed}
    assert failed == {"finite_constants"}
    failed = {r.name for r in check_exported(trace("prefill", "write_first"), CONTRACTS["prefill"]) if not r.passed}
    assert failed == {"ring_reads_before_write"}


@pytest.mark.parametrize("custom", [True, False], ids=["operators", "aten"])
@pytest.mark.parametrize(
    ("method", "other", "check", "reason"),
    [
        ("main", "prefill", "ring_reads_before_write", "write-first order.*never derived from the graph of a one"),
        ("prefill", "main", "ring_writes_before_read", "read-first order.*never derived from the graph of a program"),
    ],
)
def test_one_method_derived_from_the_others_graph_is_refused_with_the_reason(
    method: str, other: str, check: str, reason: str, custom: bool
) -> None:
    """The order of reads and writes is in the graph, whatever name and shapes it is presented under."""
    with pytest.raises(GraphContractError, match=f"{other}: {check} failed \\({reason}"):
        assert_graph_contract(trace(method, custom=custom), CONTRACTS[other])


@pytest.mark.parametrize("as_module", [False, True])
def test_tracing_a_graph_instead_of_a_decoder_is_refused_with_the_reason(as_module: bool) -> None:
    program = trace("main")
    graph: Any = program.module() if as_module else program
    with pytest.raises(GraphContractError, match="write rings first") as caught:
        programs.trace(graph, PREFILL, programs.Limits(max_context_length=64, max_prefill_chunk=24))
    assert (caught.value.owner, caught.value.expected) == ("trace", "a Decoder")


def test_one_call_holds_an_exported_program_to_its_contract() -> None:
    results = assert_graph_contract(trace("main"), CONTRACTS["main"])
    assert {r.name for r in results} <= set(TRACED_CHECKS) and all(r.passed for r in results)
    with pytest.raises(GraphContractError, match="main: finite_constants failed") as caught:
        assert_graph_contract(trace("main", "infinite_weight", "item_on_data"), CONTRACTS["main"])
    assert "no_scalar_read_from_data failed" in caught.value.got  # every failure is listed


def test_evidence_says_what_was_seen() -> None:
    results = {r.name: r.evidence for r in check_exported(trace("main"), CONTRACTS["main"])}
    assert "Mod(" in results["write_index_is_definition"] and "- 1, 8)" in results["write_index_is_definition"]
    assert "shape of position_ids" in results["ring_write_index_from_shapes"]
    assert "S 1..64" in results["dynamic_ranges"] and "C 2..64" in results["dynamic_ranges"]


def test_a_decomposed_program_is_refused() -> None:
    decomposed = trace("main", custom=False).run_decompositions({})
    with pytest.raises(GraphContractError, match="functionalised"):
        check_exported(decomposed, CONTRACTS["main"])


def test_a_program_with_other_inputs_is_refused() -> None:
    program = export(torch.nn.Linear(2, 2), (torch.zeros(1, 2),))
    with pytest.raises(GraphContractError, match="1 inputs"):
        check_exported(program, CONTRACTS["main"])


def test_expected_rows_are_the_newest_of_each_slot() -> None:
    ring, full = STATES[0], STATES[2]
    assert expected_rows(ring, 8, 3).tolist() == [0, 1, 2, -1, -1, -1, -1, -1]
    assert expected_rows(ring, 8, 20).tolist() == [16, 17, 18, 19, 12, 13, 14, 15]
    assert expected_rows(full, 6, 4).tolist() == [0, 1, 2, 3, -1, -1]


def test_sampled_lengths_wrap_the_ring_and_reach_the_corners() -> None:
    lengths = sample_lengths(CONTRACTS["prefill"])
    assert Lengths(2, 2) in lengths and Lengths(24, 64) in lengths
    assert any(one.query_len > 8 for one in lengths), "no chunk longer than the ring"
    assert any(one.offset % 8 + one.query_len > 8 for one in lengths), "no chunk straddles the ring's end"
    assert played_lengths(CONTRACTS["prefill"]) == lengths, "the toy context is a few turns of its ring"
    assert all(2 <= one.seq_len <= 64 and one.offset >= 0 for one in lengths)


@pytest.mark.parametrize("read_first", [True, False])
def test_a_convolution_reads_its_state_before_it_is_replaced(read_first: bool) -> None:
    state = StateSpec(
        name="layer_0_inputs", layers=(0,), kind="conv", role="inputs", rows=2, max_rows=2, window=None, row_shape=(4,),
        dtype="float32",
    )  # fmt: skip
    interface = MethodSpec(
        write_first=True,
        logits="last",
        inputs=tuple(TensorSpec(name=n, shape=(1, 1), dtype="float32") for n in ("ids", "positions", state.name)),
        outputs=(TensorSpec(name="logits", shape=(1, 7), dtype="float32"),),
        dims={},
        mutates=(state.name,),
    )
    inputs: dict[Value, str] = {0: "ids", 1: "positions", 2: state.name}
    read = Step("read", "aten::cat", reads=(2, 0), results=(3,))
    write = Step("write", "aten::copy_", reads=(0,), writes=(2,))
    steps = (read, write) if read_first else (write, read)
    flow = Flow(inputs, {}, frozenset(), frozenset(), steps, (3,))
    assert access_order(flow, ProgramContract("main", interface, (state,)), KINDS["conv"]).passed == read_first


class Provenances(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        from_shape = torch.arange(a.shape[0])
        like = torch.zeros_like(b)
        filled = torch.zeros(4)
        filled.view(2, 2)[0].copy_(b[:2])  # through two views
        number = (b[0] * 2).long().item()
        return from_shape + 1, like, filled + 1, torch.arange(2) + number, self.weight * 2


@pytest.fixture(scope="module")
def traced() -> tuple[Flow, Trace]:
    module = Provenances()
    dynamic = {"a": {0: Dim("N", min=2, max=9)}, "b": None}
    flow = flow_of(export(module, (torch.zeros(3), torch.zeros(4)), dynamic_shapes=dynamic), ("a", "b"))
    return flow, Trace(flow)


@pytest.mark.parametrize(
    ("output", "shapes", "data", "constants"),
    [
        (0, {"a"}, set(), set()),
        (1, {"b"}, set(), set()),
        (2, set(), {"b"}, set()),
        (3, set(), {"b"}, set()),
        (4, set(), set(), {"weight"}),
    ],
    ids=["arange of a size", "zeros_like", "written through views", "scalar read", "parameter"],
)
def test_provenance(
    traced: tuple[Flow, Trace], output: int, shapes: set[str], data: set[str], constants: set[str]
) -> None:
    flow, trace_ = traced
    found = trace_.of(flow.outputs[output])
    assert (set(found.shapes), set(found.data), set(found.constants)) == (shapes, data, constants)
    assert bool(found.scalar_reads) == (output == 3)


def test_provenance_reads_as_a_sentence() -> None:
    assert str(Provenance()) == "literals"
    assert str(Provenance(shapes=frozenset({"a"}), data=frozenset({"b", "c"}))) == "shape of a; data of b, c"
