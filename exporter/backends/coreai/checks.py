"""The contract of a Core AI asset, read back from what was saved.

Letters: Q query_len, S seq_len, L layers of a stack, V vocab_size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from exporter.backends.coreai.bytecode import StoredBlobs, stored_blobs
from exporter.backends.coreai.file import BYTECODE, Argument, Asset, Function
from exporter.backends.coreai.flow import StateFlow, flow_of_function, layer_states
from exporter.backends.coreai.landing import write_index_is_definition, writes_land_on_their_rows
from exporter.backends.coreai.ranges import ranges_of
from exporter.errors import GraphContractError
from exporter.graph.checks_flow import mutated_inputs_exactly_states, orders, write_indices_from_shapes
from exporter.graph.contract import ProgramContract
from exporter.graph.contract_file import ContractFile
from exporter.graph.provenance import Trace
from exporter.spec import CheckResult, ProgramSpec, TensorSpec

ELEMENTS = {"float32": "f32", "int32": "si32", "float16": "f16"}


def check_file(
    file: Asset, contracts: Sequence[ProgramContract], demands: ContractFile, recorded: ProgramSpec | None
) -> list[CheckResult]:
    """See `ChecksModule.check_file`."""
    return check_asset(file, contracts)


def check_asset(file: Asset, contracts: Sequence[ProgramContract]) -> list[CheckResult]:
    """Check an asset against one contract for each method, over the stacked states.

    Raises:
        BundleError: its constants cannot be read.
        GraphContractError: its functions are not those of the contracts.
    """
    got, expected = (", ".join(sorted(names)) for names in (file.functions, (c.method for c in contracts)))
    if got != expected:
        raise GraphContractError(
            "graph checks",
            got=f"an asset with the functions {got}",
            expected=f"the functions {expected}",
            repair="Give one contract for each function of the asset.",
        )
    results = []
    for contract in contracts:
        results += check_function(file.functions[contract.method], contract, file.ranges.get(contract.method))
    return [*results, weights_stored_once(stored_blobs(file.path / BYTECODE), contracts[0])]


def check_function(
    function: Function, contract: ProgramContract, ranges: Mapping[str, list[list[int]]] | None = None
) -> list[CheckResult]:
    """Check one function, and the ranges recorded for it if there are any, against a contract over stacked states."""
    state_flow = flow_of_function(function, contract.states)
    trace = Trace(state_flow.flow)
    layered = by_layer(contract)
    return [
        *write_indices_from_shapes(state_flow.flow, trace, layered),
        write_index_is_definition(function, state_flow, layered),
        writes_land_on_their_rows(function, state_flow, layered),
        *orders(state_flow.flow, layered),
        mutated_inputs_exactly_states(state_flow.flow, layered),
        no_whole_state_copy(function, state_flow, contract),
        finite_constants(function, contract),
        dynamic_axes(function, contract, ranges),
        last_token_logits_only(function, contract),
    ]


def by_layer(contract: ProgramContract) -> ProgramContract:
    """The same contract with one state a layer."""
    tensors = {tensor.name: tensor for tensor in contract.interface.inputs}
    states = layer_states(contract.states)
    inputs: list[TensorSpec] = list(contract.interface.inputs[:2])
    for state in states:
        stack = tensors[state.name.rpartition("[")[0]]
        inputs.append(stack.model_copy(update={"name": state.name, "shape": (1, *stack.shape[1:])}))
    names = tuple(state.name for state in states)
    interface = contract.interface.model_copy(update={"inputs": tuple(inputs), "mutates": names})
    return replace(contract, interface=interface, states=states)


def no_whole_state_copy(function: Function, flow: StateFlow, contract: ProgramContract) -> CheckResult:
    """A stack is only sliced by layer and updated by rows of one layer, always in its latest version, and no other
    value is as large as a stack."""
    problems = [*flow.whole, *flow.stale]
    stacks = {state.type.shape: state.name for state in function.states if flow.layers[state.name] > 1}
    for operation in function.operations:
        if operation.name in ("coreai.read_handle", "coreai.slice_update"):
            continue
        for value in operation.results:
            kind = function.types.get(value)
            if kind is not None and kind.shape in stacks:
                problems.append(f"{operation.name} makes a tensor of the size of {stacks[kind.shape]}")
    evidence = f"{len(flow.writes)} writes, each inside one layer; {len(flow.reads)} slices of one layer"
    return contract.result("no_whole_state_copy", problems, evidence)


def finite_constants(function: Function, contract: ProgramContract) -> CheckResult:
    """No infinity or NaN among the constants in the program's text."""
    count, problems = 0, []
    for operation, kind in function.constants():
        if operation.constant is not None and not kind.is_integer:
            count += 1
            if not np.isfinite(operation.constant.astype(np.float64)).all():
                problems.append(f"a constant {kind} holds a value that is not finite")
    return contract.result("finite_constants", problems, f"{count} floating-point constants, all finite")


def dynamic_axes(
    function: Function, contract: ProgramContract, ranges: Mapping[str, list[list[int]]] | None = None
) -> CheckResult:
    """Names, dtypes and axes are those of the interface: dynamic exactly where a dimension has a name. The ranges in
    the asset's metadata, if there are any, are the declared ones."""
    problems, dynamic = [], []
    if ranges is not None and ranges != (declared_ranges := ranges_of([contract])[contract.method]):
        problems.append(f"the ranges recorded are {dict(ranges)}, declared {declared_ranges}")
    declared = contract.interface.inputs
    got: tuple[Argument, ...] = (*function.inputs, *function.states)
    if [a.name for a in got] != [tensor.name for tensor in declared]:
        names = ", ".join(a.name for a in got)
        problems.append(f"the arguments are {names}, expected {', '.join(contract.input_names)}")
    for argument, tensor in zip(got, declared, strict=False):
        low_high = [contract.range_of(n) for n in tensor.shape]
        want = tuple(low if low == high else None for low, high in low_high)
        if argument.type.shape != want or argument.type.element != ELEMENTS[tensor.dtype]:
            problems.append(f"{argument.name} is {argument.type}, expected {want} {tensor.dtype}")
        dynamic += [f"{tensor.name} {n}" for n, size in zip(tensor.shape, want, strict=True) if size is None]
    return contract.result("dynamic_ranges", problems, f"dynamic: {', '.join(map(str, dynamic)) or 'nothing'}")


def last_token_logits_only(function: Function, contract: ProgramContract) -> CheckResult:
    """The one output is ``[1, V]``, and nothing on the way has V and a dynamic axis."""
    vocab = contract.vocab_size
    problems = []
    got = [(output.name, output.type.shape) for output in function.outputs]
    if got != [(contract.interface.outputs[0].name, (1, vocab))]:
        problems.append(f"the outputs are {got}, expected one of [1, {vocab}]")
    for operation in function.operations:
        for value in operation.results:
            kind = function.types.get(value)
            if kind is not None and vocab in kind.shape and None in kind.shape:
                problems.append(f"{operation.name} makes {kind}")
    return contract.result("last_token_logits_only", problems, f"output {got}, vocabulary {vocab}")


def weights_stored_once(stored: StoredBlobs, contract: ProgramContract) -> CheckResult:
    """No large constant of the file repeats another, as it is or with its numbers in another order, such as a tied head
    stored a second time, transposed."""
    problems = []
    if stored.repeated:
        sizes = ", ".join(str(blob.size) for blob in stored.repeated)
        problems.append(f"constants of {sizes} bytes repeat the numbers of others")
    rest = stored.file_bytes - stored.blob_bytes
    evidence = f"{len(stored.blobs)} constants of {stored.blob_bytes} bytes, none twice; {rest} bytes beside them"
    return replace(contract, method="file").result("weights_stored_once", problems, evidence)
