"""The graph contract of a saved package, checked on the operators in its file.

Letters: Q query_len, S seq_len.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from exporter.backends.coreml.checks_values import exact_index_arithmetic, finite_constants, last_token_logits_only
from exporter.backends.coreml.checks_writes import write_index_is_definition
from exporter.backends.coreml.file import Function, Package, Typed
from exporter.backends.coreml.flow import flow_of
from exporter.errors import GraphContractError
from exporter.graph.checks_flow import mutated_inputs_exactly_states, orders, write_indices_from_shapes
from exporter.graph.contract import DEFAULT_LIMITS, FileLimits, ProgramContract, summary
from exporter.graph.contract_file import ContractFile
from exporter.graph.provenance import Trace
from exporter.graph.repeats import SMALL, orderless_digest
from exporter.spec import CheckResult, ProgramSpec

_ROWS = frozenset({"slice_update", "slice_by_index"})
MOST_READS = 2
"""A state is read once before the write and, where a method attends after the write, once more."""


def check_file(
    file: Package, contracts: Sequence[ProgramContract], demands: ContractFile, recorded: ProgramSpec | None
) -> list[CheckResult]:
    """See `ChecksModule.check_file`."""
    return check_package(file, contracts)


def check_package(
    package: Package, contracts: Sequence[ProgramContract], limits: FileLimits = DEFAULT_LIMITS
) -> list[CheckResult]:
    """Every check on every function, then those of the whole file.

    Raises:
        GraphContractError: the package has other functions than the contracts.
    """
    functions = package.functions()
    names = [contract.interface.function or contract.method for contract in contracts]
    if set(functions) != set(names):
        raise GraphContractError(
            f"package {package.path.name}", got=f"the functions {', '.join(sorted(functions)) or 'none'}",
            expected=f"the functions {', '.join(names)}", repair="Export the model again, or correct the contract.",
        )  # fmt: skip
    results = []
    for contract, name in zip(contracts, names, strict=True):
        function = functions[name]
        flow = flow_of(function)
        trace = Trace(flow)
        results += [
            states_as_declared(package, function, contract),
            *write_indices_from_shapes(flow, trace, contract),
            write_index_is_definition(package, function, contract),
            *orders(flow, contract),
            mutated_inputs_exactly_states(flow, contract),
            no_whole_state_copy(function, contract),
            dynamic_ranges(package, function, contract),
            last_token_logits_only(function, contract),
            exact_index_arithmetic(function, contract),
            finite_constants(package, function, contract),
        ]
    return [*results, weights_stored_once(package, "+".join(sorted(functions)), limits)]


def states_as_declared(package: Package, function: Function, contract: ProgramContract) -> CheckResult:
    """Program and description declare the contract's states, float16 and of fixed shape, and no others."""
    want = {state.name: Typed("float16", state.shape()) for state in contract.states}
    array = {record.name: record.type.stateType.arrayType for record in package.descriptions()[function.name].state}
    described = {name: tuple(one.shape) for name, one in array.items()}
    problems = [f"{name} is {got.dtype} {got.shape}, declared {want.get(name)}" for name, got in function.states.items()
                if want.get(name) != got]  # fmt: skip
    problems += [f"{name} is missing" for name in want if name not in function.states]
    problems += [f"{name} is described as {described.get(name)}, declared {one.shape}" for name, one in want.items()
                 if described.get(name) != one.shape]  # fmt: skip
    return contract.result("states_as_declared", problems, f"{len(want)} states, float16, every shape fixed")


def no_whole_state_copy(function: Function, contract: ProgramContract) -> CheckResult:
    """A state is written once and read at most `MOST_READS` times; one with a row a token is only sliced, and any
    other is cast only where the whole program computes in float32."""
    problems, reads, writes = [], 0, 0
    half = any(function.types[name].dtype == "float16" and function.types[name].shape for name in function.constants)
    for state in contract.states:
        read = [op for op in function.operations if op.type == "read_state" and op.inputs["input"] == (state.name,)]
        wrote = [op for op in function.operations if op.type == "write_state" and op.inputs["input"] == (state.name,)]
        reads, writes = reads + len(read), writes + len(wrote)
        if len(wrote) != 1 or len(read) > MOST_READS:
            problems.append(f"{state.name} has {len(read)} reads and {len(wrote)} writes")
        held = {name for op in read for name in op.outputs}
        for op in function.operations:
            takes = held & {name for names in op.inputs.values() for name in names}
            copies = op.type not in _ROWS if state.cache_kind.grows else half and op.type == "cast"
            if takes and copies:
                problems.append(f"{op.type} {op.name} takes all rows of {state.name}")
    evidence = f"{reads} reads and {writes} writes of {len(contract.states)} states"
    return contract.result("no_whole_state_copy", problems, evidence)


def dynamic_ranges(package: Package, function: Function, contract: ProgramContract) -> CheckResult:
    """Every dynamic axis has the declared range, as a range. No other input lists shapes or is fixed: Core ML takes a
    fixed shape for a list of one."""
    problems, shown = [], []
    records = {record.name: record.type.multiArrayType for record in package.descriptions()[function.name].input}
    declared = contract.interface.inputs[:2]
    if set(records) != {tensor.name for tensor in declared}:
        problems.append(f"the inputs are {', '.join(records)}")
    ranged = any(record.WhichOneof("ShapeFlexibility") == "shapeRange" for record in records.values())
    for tensor in declared:
        want = [contract.range_of(n) for n in tensor.shape]
        record, typed = records.get(tensor.name), function.inputs.get(tensor.name)
        if record is None or typed is None:
            continue
        kind = record.WhichOneof("ShapeFlexibility")
        if kind != "shapeRange" and (ranged or kind is not None):
            problems.append(f"{tensor.name} {'lists shapes' if kind else 'is fixed beside a range'}")
            continue
        bounds = [(one.lowerBound, one.upperBound) for one in record.shapeRange.sizeRanges]
        got = bounds or [(n, n) for n in record.shape]
        if got != want:
            problems.append(f"{tensor.name} accepts {got}, declared {want}")
        if [n is None for n in typed.shape] != [low < high for low, high in want] or typed.dtype != tensor.dtype:
            problems.append(f"{tensor.name} is {typed.dtype} {typed.shape} in the program, declared {want}")
        shown.append(f"{tensor.name} {got}")
    return contract.result("dynamic_ranges", problems, summary(shown))


def weights_stored_once(package: Package, program: str, limits: FileLimits) -> CheckResult:
    """Repeated bytes of the weights file stay below a small share of the unique ones, over all functions. A large
    constant with the same numbers in another order counts as repeated."""
    content: dict[bytes, list[int]] = {}
    for blob in {blob.offset: blob for blob in package.blobs()}.values():
        data = package.weights[blob.offset : blob.offset + blob.size].data
        digest = hashlib.blake2b(data).digest() if blob.size < SMALL else orderless_digest(data)
        content.setdefault(digest, []).append(blob.size)
    unique = sum(sizes[0] for sizes in content.values())
    repeated = sum(sum(sizes[1:]) for sizes in content.values())
    unused = len(package.weights) - unique - repeated
    passed = not repeated or repeated < limits.max_duplicate_share * unique
    evidence = f"{unique} unique bytes, {repeated} repeated, {unused} of headers; package {package.file_bytes}"
    return CheckResult(name="weights_stored_once", program=program, passed=passed, evidence=evidence)
