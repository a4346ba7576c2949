"""The contract of a `.pte`, read back from its bytes."""

from __future__ import annotations

import math
import mmap
import operator as arithmetic
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
from executorch.exir import schema
from executorch.exir.scalar_type import ScalarType

from exporter.backends.executorch.file import Plan, PteBytes, PteFile, read_pte
from exporter.backends.executorch.flow import flow_of_plan
from exporter.backends.executorch.stored import stored_weights
from exporter.errors import GraphContractError
from exporter.graph.checks_flow import check_flow
from exporter.graph.contract import DEFAULT_LIMITS, FileLimits, ProgramContract, summary
from exporter.graph.contract_file import ContractFile
from exporter.graph.flow import Flow
from exporter.graph.index_proof import Lengths, sample_lengths
from exporter.graph.provenance import Trace
from exporter.spec import CheckResult, ProgramSpec

_COPIES = frozenset(
    {f"aten::{name}" for name in (
        "copy", "copy_", "clone", "_to_copy", "alias_copy", "detach_copy", "lift_fresh_copy", "slice_scatter",
        "select_scatter", "index_copy", "index_put", "scatter",
    )} | {"dim_order_ops::_clone_dim_order", "dim_order_ops::_to_dim_order_copy"}
)  # fmt: skip
_FLOATS = {ScalarType.FLOAT: "<f4", ScalarType.HALF: "<f2", ScalarType.DOUBLE: "<f8"}
_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "executorch_prim::add": arithmetic.add,
    "executorch_prim::sub": arithmetic.sub,
    "executorch_prim::mul": arithmetic.mul,
    "executorch_prim::mod": arithmetic.mod,
    "executorch_prim::floordiv": arithmetic.floordiv,
    "executorch_prim::sym_min": min,
    "executorch_prim::sym_max": max,
}


def check_file(
    file: PteBytes, contracts: Sequence[ProgramContract], demands: ContractFile, recorded: ProgramSpec | None
) -> list[CheckResult]:
    """See `ChecksModule.check_file`. A recorded program may call the kernels that its record lists."""
    operators = demands.operators(*runtime_registry()) if recorded is None else frozenset(recorded.operators)
    return check_lowered(file.data, demands.bind(contracts), operators, demands.limits)


def check_lowered(
    data: bytes | mmap.mmap,
    contracts: Iterable[ProgramContract],
    allowed_operators: frozenset[str],
    limits: FileLimits = DEFAULT_LIMITS,
) -> list[CheckResult]:
    """Check the bytes of a `.pte`.

    Args:
        data: the whole file.
        contracts: one for each method of the file.
        allowed_operators: the kernels the target runtime has, e.g. of `runtime_registry`.
        limits: what holds for the file as a whole.

    Raises:
        GraphContractError: the file cannot be read, its methods are not those of the contracts, or a method's inputs
            are not those of its contract.
    """
    file = read_pte(data)
    results: list[CheckResult] = []
    contracts = list(contracts)
    got, expected = (", ".join(sorted(names)) for names in (file.plans, (c.method for c in contracts)))
    if got != expected:
        raise GraphContractError(
            "graph checks",
            got=f"a file with the methods {got}",
            expected=f"the methods {expected}",
            repair="Give one contract for each method of the file.",
        )
    for contract in contracts:
        plan = file.plans[contract.method]
        flow = flow_of_plan(plan, contract.input_names)
        trace = Trace(flow)
        results += check_flow(flow, trace, contract)
        results += [
            write_index_is_definition(plan, flow, contract),
            no_whole_state_copy(flow, contract),
            finite_constants(data, file, plan, contract),
            dynamic_ranges(plan, contract),
            last_token_logits_only(plan, trace, contract),
            operators_in_registry(plan, contract, allowed_operators),
            delegated_share(plan, contract),
            planned_bytes(plan, contract),
        ]
    return [*results, weights_stored_once(data, file, limits), file_bytes(file, limits)]


def runtime_registry() -> tuple[str, frozenset[str]]:
    """The runtime of the installed wheel: its name, with the version, and the kernels it has registered."""
    from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401  registers llama::*
    from executorch.extension.pybindings import portable_lib
    from executorch.kernels import quantized  # noqa: F401  registers quantized_decomposed::*

    return f"executorch-{version('executorch')}-wheel", frozenset(portable_lib._get_operator_names())


def write_index_is_definition(plan: Plan, flow: Flow, contract: ProgramContract) -> CheckResult:
    """The number a row write starts at is the row of position S - Q, computed for sampled lengths."""
    states = contract.positional
    lengths = sample_lengths(contract)
    problems, count = [], 0
    starts: dict[str, int] = {}
    for call in plan.kernel_calls:
        if plan.operators[call.op_index].startswith("llama::update_cache"):
            name = flow.input_name(call.args[1])
            if name in states:
                starts[name] = call.args[2]
    for name, start in starts.items():
        state = states[name]
        count += 1
        for one in lengths:
            want = state.cache_kind.row_of(one.offset, state.rows)
            got = _numbers(plan, contract, one).get(start)
            if got != want:
                problems.append(f"{name} at Q={one.query_len} S={one.seq_len} starts at {got}, expected {want}")
                break
    return contract.result(
        "write_index_is_definition", problems, f"{count} row writes computed for {len(lengths)} pairs of lengths"
    )


def _numbers(plan: Plan, contract: ProgramContract, lengths: Lengths) -> dict[int, Any]:
    """The integers of a plan for concrete lengths, as far as they are computed from sizes of inputs."""
    query, sequence = plan.inputs[:2]
    sizes = {(query, 1): lengths.query_len, (sequence, 1): lengths.seq_len}
    known: dict[int, Any] = {i: v.int_val for i, v in enumerate(plan.values) if isinstance(v, schema.Int)}
    for call in plan.kernel_calls:
        name = plan.operators[call.op_index].partition(".")[0]
        *arguments, out = call.args
        if name == "aten::sym_size":
            known[out] = sizes.get((arguments[0], known.get(arguments[1], -1)))
        elif name in _ARITHMETIC:
            left, right = (known.get(a) for a in arguments)
            known[out] = None if left is None or right is None else _ARITHMETIC[name](left, right)
        else:
            # Numbers from anything else are unknown.
            known.update((a, None) for a in call.args[-1:] if isinstance(plan.values[a], schema.Int))
    return known


def no_whole_state_copy(flow: Flow, contract: ProgramContract) -> CheckResult:
    """No copy takes a whole state or writes one: rows are written in place, and nothing is written back.

    Rows that belong to no position, such as the few of a convolution, are replaced whole by design.
    """
    states = contract.positional.keys()
    problems, copies = [], 0
    for step in flow.steps:
        if step.operator not in _COPIES:
            continue
        copies += 1
        touched = {flow.input_name(v) for v in (*step.reads, *step.writes)} & states
        problems += [f"{step.label} copies {name}" for name in sorted(str(n) for n in touched)]
    return contract.result("no_whole_state_copy", problems, f"none of {copies} copies touches a state")


def finite_constants(data: bytes | mmap.mmap, file: PteFile, plan: Plan, contract: ProgramContract) -> CheckResult:
    """No infinity or NaN among the numbers and floating-point constants of the plan."""
    problems, numbers, tensors = [], 0, 0
    for index, value in enumerate(plan.values):
        if isinstance(value, schema.Double):
            numbers += 1
            if not math.isfinite(float(value.double_val)):
                users = [
                    plan.operators[c.op_index] for c in plan.kernel_calls if index in c.args
                ]  # fmt: skip
                problems.append(f"{', '.join(users) or 'nobody'} takes {value.double_val}")
        elif isinstance(value, schema.Tensor) and value.data_buffer_idx in file.constants:
            dtype, blob = _FLOATS.get(value.scalar_type), file.constants[value.data_buffer_idx]
            if dtype is None or not blob.size:
                continue
            tensors += 1
            content = np.frombuffer(data, dtype, blob.size // np.dtype(dtype).itemsize, blob.offset)
            if not np.isfinite(content).all():
                problems.append(f"constant {value.data_buffer_idx} {value.sizes} holds a value that is not finite")
    return contract.result("finite_constants", problems, f"{numbers} numbers and {tensors} constants, all finite")


def dynamic_ranges(plan: Plan, contract: ProgramContract) -> CheckResult:
    """Every input's upper bounds are the declared ones; an input with a range is resizable."""
    problems, shown = [], []
    for value, declared in zip(plan.inputs, contract.interface.inputs, strict=True):
        tensor = plan.tensor(value)
        if tensor is None:
            problems.append(f"{declared.name} is no tensor")
            continue
        want = [contract.range_of(n) for n in declared.shape]
        if list(tensor.sizes) != [high for _, high in want]:
            problems.append(f"{declared.name} is planned as {tensor.sizes}, declared {want}")
        resizable = tensor.shape_dynamism != schema.TensorShapeDynamism.STATIC
        if resizable != any(low < high for low, high in want):
            problems.append(f"{declared.name} is {'resizable' if resizable else 'static'}, declared {want}")
        if resizable:
            shown.append(f"{declared.name} up to {tensor.sizes}")
    return contract.result("dynamic_ranges", problems, summary(shown) or "every input is static")


def last_token_logits_only(plan: Plan, trace: Trace, contract: ProgramContract) -> CheckResult:
    """The output is ``[1, V]`` and no planned tensor is as large as Q rows of V."""
    shapes = [plan.shape(value) for value in plan.outputs]
    problems = []
    query, vocab = contract.query[1], contract.vocab_size
    if contract.last_token_only:
        if shapes != [(1, vocab)]:
            problems.append(f"the outputs are {shapes}, expected one of [1, {vocab}]")
        for index in range(len(plan.values)):
            shape = plan.shape(index)
            # A transposed weight has V among its sizes too, but depends on no input.
            if (
                shape
                and query > 1
                and shape[-1] == vocab
                and math.prod(shape) >= query * vocab
                and trace.of(index).data
            ):
                problems.append(f"value {index} is planned as {list(shape)}")
    return contract.result(
        "last_token_logits_only", problems, f"outputs {shapes}; {plan.planned_bytes} bytes planned in all"
    )


def operators_in_registry(plan: Plan, contract: ProgramContract, allowed_operators: frozenset[str]) -> CheckResult:
    """Every kernel outside the delegates exists in the target runtime."""
    called = plan.operators_called()
    missing = [f"{name} is not in the runtime" for name in called if name not in allowed_operators]
    return contract.result("operators_in_registry", missing, f"{len(called)} kernels: {', '.join(called)}")


def delegated_share(plan: Plan, contract: ProgramContract) -> CheckResult:
    """The share of operators that run inside delegates, against the contract's floor."""
    outside, calls = len(plan.kernel_calls), plan.delegate_calls
    nodes = [plan.delegates[call.delegate_index].nodes for call in calls]
    known = [n for n in nodes if n is not None]
    if len(known) == len(nodes):
        inside, what = sum(known), "operators in"
    else:
        # A payload that cannot be read counts as one operator, so the real share is larger.
        inside, what = sum(1 if n is None else n for n in nodes), "operators, at least, in"
    share = inside / (inside + outside) if inside + outside else 0.0
    evidence = f"{inside} {what} {len(calls)} delegate calls, {outside} kernels outside: {share:.0%}"
    floor = contract.min_delegated_share
    problems = [f"{evidence}, the floor is {floor:.0%}"] if floor is not None and share < floor else []
    return contract.result("delegated_share", problems, evidence)


def planned_bytes(plan: Plan, contract: ProgramContract) -> CheckResult:
    """The memory planned for activations and outputs, against the contract's ceiling; states are the caller's."""
    ceiling = contract.max_planned_bytes
    evidence = f"{plan.planned_bytes} bytes planned"
    problems = [f"{evidence}, at most {ceiling}"] if ceiling is not None and plan.planned_bytes > ceiling else []
    return contract.result("planned_bytes", problems, evidence)


def weights_stored_once(data: bytes | mmap.mmap, file: PteFile, limits: FileLimits) -> CheckResult:
    """Repeated bytes stay below a small share of the unique ones: a tied matrix is in the file once."""
    stored = stored_weights(data, file)
    evidence = (
        f"{stored.unique_bytes} unique bytes, {stored.duplicate_bytes} repeated ({stored.duplicate_share:.1%}); "
        f"file {file.size}"
    )
    largest = sorted(stored.duplicates, key=lambda blobs: -blobs[0].size)
    shown = [" = ".join(blob.names[0] for blob in blobs) + f" ({blobs[0].size} bytes)" for blobs in largest[:3]]
    return CheckResult(
        name="weights_stored_once",
        program=_whole(file),
        # No repetition meets any limit, 0 included.
        passed=not stored.duplicate_bytes or stored.duplicate_share < limits.max_duplicate_share,
        evidence=evidence + (f"; repeated: {'; '.join(shown)}" if shown else ""),
    )


def file_bytes(file: PteFile, limits: FileLimits) -> CheckResult:
    """The size of the file, against a ceiling."""
    ceiling = limits.max_file_bytes
    passed = ceiling is None or file.size <= ceiling
    evidence = f"{file.size} bytes" + ("" if passed else f", at most {ceiling}")
    return CheckResult(name="file_bytes", program=_whole(file), passed=passed, evidence=evidence)


def _whole(file: PteFile) -> str:
    return "+".join(sorted(file.plans))
