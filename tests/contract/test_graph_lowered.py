"""Lowered files: a good one passes every check, and each mutant fails the check made for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from programs_for_checks import CONTRACTS, MAX_CHUNK, STATES, lower, trace

from exporter.backends import traits
from exporter.backends.executorch.assertion import assert_graph_contract
from exporter.backends.executorch.checks import check_lowered, runtime_registry
from exporter.backends.executorch.file import Blob, PteFile, read_pte
from exporter.backends.executorch.flow import flow_of_plan
from exporter.backends.executorch.stored import stored_weights
from exporter.errors import GraphContractError
from exporter.graph import FileLimits, ProgramContract, refuse_failed
from exporter.graph.provenance import Trace
from exporter.spec import CheckResult

CHECKS = {
    "ring_write_index_from_shapes", "full_write_index_from_shapes", "mutated_inputs_exactly_states",
    "no_scalar_read_from_data", "no_tensor_remainder", "write_index_is_definition", "no_whole_state_copy",
    "finite_constants", "dynamic_ranges", "last_token_logits_only", "operators_in_registry", "delegated_share",
    "full_writes_before_read", "conv_reads_before_write", "planned_bytes",
}  # fmt: skip
# Lowering takes seconds, so independent faults share a file.
MUTANTS = [
    ("prefill", ("data_index", "data_index_full", "infinite_mask", "late_slice", "short_sequence"), {
        "ring_write_index_from_shapes", "full_write_index_from_shapes", "write_index_is_definition",
        "finite_constants", "last_token_logits_only", "dynamic_ranges",
    }),
    ("prefill", ("write_first", "tensor_remainder"), {"ring_reads_before_write", "no_tensor_remainder"}),
    ("main", ("wrong_slot", "item_on_data", "infinite_weight"), {
        "write_index_is_definition", "no_scalar_read_from_data", "finite_constants",
    }),
    ("main", ("read_first", "full_read_first", "item_on_weight", "unwritten"), {
        "ring_writes_before_read", "full_writes_before_read", "no_scalar_read_from_data",
        "mutated_inputs_exactly_states", "full_write_index_from_shapes",
    }),
    ("main", ("extra_mutation",), {"mutated_inputs_exactly_states", "last_token_logits_only"}),
]  # fmt: skip


@pytest.fixture(scope="module")
def registry() -> frozenset[str]:
    return runtime_registry()[1]


@pytest.fixture(scope="module")
def good() -> bytes:
    return lower({method: trace(method) for method in CONTRACTS})


def by_name(results: list[CheckResult], method: str) -> dict[str, CheckResult]:
    return {r.name: r for r in results if r.program == method}


def changed(method: str, **changes: Any) -> list[ProgramContract]:
    """Both contracts, one of them asking for something else."""
    return [dataclasses.replace(c, **(changes if m == method else {})) for m, c in CONTRACTS.items()]


def test_a_good_file_passes_every_check(good: bytes, registry: frozenset[str]) -> None:
    results = check_lowered(good, CONTRACTS.values(), registry)
    assert [r for r in results if r.refused] == []
    for method, order in (("prefill", "ring_reads_before_write"), ("main", "ring_writes_before_read")):
        assert set(by_name(results, method)) == CHECKS | {order}
    assert set(by_name(results, "main+prefill")) == {"weights_stored_once", "file_bytes"}
    assert {r.name for r in results} == set(traits("executorch").checks)
    assert assert_graph_contract(good, *CONTRACTS.values()) == results  # the installed runtime's kernels


@pytest.mark.parametrize(("method", "faults", "checks"), MUTANTS)
def test_mutants_fail_their_checks_and_no_other(
    method: str, faults: tuple[str, ...], checks: set[str], registry: frozenset[str]
) -> None:
    # A weight inside a delegate is out of sight, so mutants are lowered without one.
    data = lower({method: trace(method, *faults)}, delegate=False)
    results = check_lowered(data, [CONTRACTS[method]], registry)
    assert {r.name for r in results if r.refused} == checks
    with pytest.raises(GraphContractError, match=sorted(checks)[0]):
        assert_graph_contract(data, CONTRACTS[method], allowed_operators=registry)


@pytest.mark.parametrize("delegate", [True, False], ids=["delegated", "portable"])
def test_logits_descend_from_the_tokens_and_every_state(delegate: bool) -> None:
    """No link of the chain is lost, through delegates and through views that are no instruction."""
    data = lower({"main": trace("main")}, delegate=delegate)
    flow = flow_of_plan(read_pte(data).plans["main"], CONTRACTS["main"].input_names)
    found = Trace(flow).of(flow.outputs[0])
    assert found.data == {"input_ids"} | {state.name for state in STATES}
    assert found.shapes == {"position_ids"}
    assert any(step.operator == "view" for step in flow.steps) or delegate


def test_write_back_copies_fail(registry: frozenset[str]) -> None:
    data = lower({"main": trace("main")}, in_place=False, delegate=False)
    results = by_name(check_lowered(data, [CONTRACTS["main"]], registry), "main")
    assert (
        not results["no_whole_state_copy"].passed and "copies layer_0_keys" in results["no_whole_state_copy"].evidence
    )
    assert "returns layer_0_keys" in results["mutated_inputs_exactly_states"].evidence


def test_a_read_that_lowering_moved_behind_the_write_fails(registry: frozenset[str]) -> None:
    """A read orders itself against a write in place by position alone, and partitioning may move it.

    XNNPACK takes both concatenations into one call, which runs where the later of them could: after the first write.
    The exported program is right, the file would compute other logits.
    """
    program = trace("prefill", "tensor_remainder")
    data = lower({"prefill": program})
    result = by_name(check_lowered(data, [CONTRACTS["prefill"]], registry), "prefill")["ring_reads_before_write"]
    assert not result.passed and "Xnnpack" in result.evidence


def test_an_operator_the_runtime_lacks_is_named(good: bytes, registry: frozenset[str]) -> None:
    results = check_lowered(good, CONTRACTS.values(), registry - {"llama::update_cache.out"})
    for method in CONTRACTS:
        found = by_name(results, method)["operators_in_registry"]
        assert not found.passed and "llama::update_cache.out" in found.evidence


def test_a_share_below_the_floor_fails(good: bytes, registry: frozenset[str]) -> None:
    assert by_name(check_lowered(good, changed("main", min_delegated_share=0.01), registry), "main")[
        "delegated_share"
    ].passed
    results = check_lowered(good, changed("main", min_delegated_share=0.99), registry)
    assert by_name(results, "main")["delegated_share"].refused
    assert not by_name(results, "prefill")["delegated_share"].refused
    with pytest.raises(GraphContractError, match=r"main: delegated_share failed .* right and costs more than"):
        refuse_failed(results)


def test_a_share_below_what_is_expected_of_any_file_is_a_warning(registry: frozenset[str]) -> None:
    """Nothing is delegated, and nothing is wrong."""
    data = lower({"main": trace("main")}, delegate=False)
    results = check_lowered(data, [CONTRACTS["main"]], registry)
    found = by_name(results, "main")["delegated_share"]
    assert not found.passed and found.severity == "warning" and "0%, the floor is 50%" in found.evidence
    refuse_failed(results)


def test_more_planned_memory_than_the_ceiling_fails(good: bytes, registry: frozenset[str]) -> None:
    planned = read_pte(good).plans["prefill"].planned_bytes
    for ceiling, passed in ((planned, True), (planned - 1, False)):
        results = check_lowered(good, changed("prefill", max_planned_bytes=ceiling), registry)
        assert by_name(results, "prefill")["planned_bytes"].passed == passed
        assert by_name(results, "main")["planned_bytes"].passed


def test_limits_of_the_whole_file(good: bytes, registry: frozenset[str]) -> None:
    for ceiling, passed in ((len(good), True), (len(good) - 1, False)):
        results = check_lowered(good, CONTRACTS.values(), registry, FileLimits(max_file_bytes=ceiling))
        assert by_name(results, "main+prefill")["file_bytes"].passed == passed
    share = stored_weights(good, read_pte(good)).duplicate_share
    for limit, passed in ((share + 1e-6, True), (share, share == 0)):
        results = check_lowered(good, CONTRACTS.values(), registry, FileLimits(max_duplicate_share=limit))
        assert by_name(results, "main+prefill")["weights_stored_once"].passed == passed


def test_a_plan_under_the_other_methods_contract_is_refused_with_the_reason(good: bytes) -> None:
    swapped = [dataclasses.replace(CONTRACTS[a], method=b) for a, b in (("prefill", "main"), ("main", "prefill"))]
    with pytest.raises(GraphContractError) as caught:
        assert_graph_contract(good, *swapped)
    assert "main: ring_reads_before_write failed (write-first order" in caught.value.got
    assert "prefill: ring_writes_before_read failed (read-first order" in caught.value.got


def test_contracts_for_other_methods_are_refused(good: bytes, registry: frozenset[str]) -> None:
    with pytest.raises(GraphContractError, match="methods main, prefill; expected the methods main"):
        check_lowered(good, [CONTRACTS["main"]], registry)


def test_damaged_files_are_refused(good: bytes) -> None:
    """Truncated anywhere, or with bytes of the program overwritten."""
    for size in range(len(good) // 11, len(good) - 8, len(good) // 11):
        with pytest.raises(GraphContractError, match=r"whole .*\.pte file"):
            read_pte(good[:size])
    for start in (1000, 5000, 20000):
        with pytest.raises(GraphContractError, match="does not parse"):
            read_pte(good[:start] + bytes([255]) * 2000 + good[start + 2000 :])


def test_bounds_other_than_the_declared_ones_fail(good: bytes, registry: frozenset[str]) -> None:
    interface = CONTRACTS["prefill"].interface
    wider = interface.model_copy(update={"dims": interface.dims | {"Q": (2, MAX_CHUNK + 1)}})
    results = by_name(check_lowered(good, changed("prefill", interface=wider), registry), "prefill")
    assert not results["dynamic_ranges"].passed and "[1, 24]" in results["dynamic_ranges"].evidence


def test_a_matrix_stored_twice_fails(registry: frozenset[str]) -> None:
    data = lower({"main": trace("main", "two_heads")})
    result = {r.name: r for r in check_lowered(data, [CONTRACTS["main"]], registry)}["weights_stored_once"]
    assert not result.passed
    stored = stored_weights(data, read_pte(data))
    assert stored.duplicate_bytes == 97 * 32 * 4


def test_references_to_one_place_count_once() -> None:
    data = bytes(range(64)) * 2 + bytes(64)
    constants = {1: Blob(("embedding",), 0, 64), 2: Blob(("other",), 128, 64)}

    def share(*named: Blob) -> tuple[int, int]:
        stored = stored_weights(data, PteFile({}, constants, named, (), len(data)))
        return stored.unique_bytes, stored.duplicate_bytes

    assert share(Blob(("head",), 0, 64)) == (128, 0)
    assert share(Blob(("head",), 64, 64)) == (128, 64)


def test_the_plan_says_what_inspect_shows(good: bytes) -> None:
    file = read_pte(good)
    assert set(file.plans) == {"prefill", "main"} and file.size == len(good)
    main = file.plans["main"]
    assert "llama::update_cache.out" in main.operators_called() and main.planned_bytes > 0
    assert [main.shape(v) for v in main.outputs] == [(1, 97)]
    assert {d.backend for d in main.delegates} == {"XnnpackBackend"} and all(d.nodes for d in main.delegates)
    # The embedding's table is a constant; the packed linears are named data, shared by both methods.
    assert file.constant_bytes >= 97 * 32 * 4
    assert file.named_bytes >= (97 * 32 + 2 * (96 * 32 + 32 * 32)) * 4


def test_the_registry_is_that_of_the_wheel(registry: frozenset[str]) -> None:
    assert runtime_registry()[0].startswith("executorch-1.5.1")
    assert {"llama::custom_sdpa.out", "quantized_decomposed::embedding_4bit.out", "aten::sym_size.int"} <= registry


@pytest.mark.parametrize("data", [b"", b"not a program" * 20])
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(GraphContractError, match="ExecuTorch program"):
        read_pte(data)


def test_a_contract_for_other_inputs_is_refused(good: bytes, registry: frozenset[str]) -> None:
    contract = CONTRACTS["main"]
    fewer = contract.interface.model_copy(
        update={"inputs": contract.interface.inputs[:-1], "mutates": contract.interface.mutates[:-1]}
    )
    short = ProgramContract("main", fewer, contract.states[:-1])
    with pytest.raises(GraphContractError, match="6 inputs"):
        check_lowered(good, [CONTRACTS["prefill"], short], registry)
