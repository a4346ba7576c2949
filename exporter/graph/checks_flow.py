"""The checks that read the same way before and after lowering."""

from __future__ import annotations

from exporter.graph.contract import ProgramContract
from exporter.graph.flow import SCALAR_READS, Flow
from exporter.graph.provenance import Trace
from exporter.spec import KINDS, CacheKind, CheckResult

_REMAINDERS = frozenset({"aten::remainder", "aten::remainder_", "aten::fmod", "aten::fmod_"})


def check_flow(flow: Flow, trace: Trace, contract: ProgramContract) -> list[CheckResult]:
    """Every check that needs only steps over values."""
    return [
        *write_indices_from_shapes(flow, trace, contract),
        *orders(flow, contract),
        mutated_inputs_exactly_states(flow, contract),
        no_scalar_read_from_data(flow, trace, contract),
        no_tensor_remainder(flow, contract),
    ]


def write_indices_from_shapes(flow: Flow, trace: Trace, contract: ProgramContract) -> list[CheckResult]:
    """`write_index_from_shapes` of every kind whose rows belong to positions."""
    return [write_index_from_shapes(flow, trace, contract, kind) for kind in KINDS.values() if kind.positional]


def orders(flow: Flow, contract: ProgramContract) -> list[CheckResult]:
    """`access_order` of every kind."""
    return [access_order(flow, contract, kind) for kind in KINDS.values()]


def write_index_from_shapes(flow: Flow, trace: Trace, contract: ProgramContract, kind: CacheKind) -> CheckResult:
    """The row of a write depends on shapes and constants only, not on a tensor's content."""
    names = {state.name for state in contract.of_kind(kind.name)}
    problems, seen = [], set()
    writes = [(i, step, name) for i, step, name in flow.writes_to_inputs() if name in names]
    for index, step, name in writes:
        position = trace.positions[index]
        if position.data or position.constants & flow.parameters:
            problems.append(f"{step.label} places its write to {name} by {position}")
        seen.add(str(position))
    problems += [f"{name} is never written" for name in sorted(names - {name for _, _, name in writes})]
    evidence = f"{len(writes)} writes to {len(names)} states, placed by {' | '.join(sorted(seen)) or 'nothing'}"
    return contract.result(kind.index_check, problems, evidence)


def access_order(flow: Flow, contract: ProgramContract, kind: CacheKind) -> CheckResult:
    """Whether, for the output, every state of that kind is read before or after all its writes, as the kind wants in
    such a program. A wrong order is reported with its meaning."""
    write_first, meaning = kind.writes_first(contract.write_first), kind.wrong_order(contract.write_first)
    problems, evidence, wrong = [], [], False
    reads, writes = list(flow.live_reads()), list(flow.writes_to_inputs())
    for state in contract.of_kind(kind.name):
        read = [(i, step.label) for i, step, name in reads if name == state.name]
        written = [(i, step.label) for i, step, name in writes if name == state.name]
        if not read or not written:
            problems.append(f"{state.name} has {len(read)} reads for the output and {len(written)} writes")
            continue
        early, late = (written, read) if write_first else (read, written)
        if max(early)[0] >= min(late)[0]:
            wrong = True
            problems.append(f"{state.name}: {max(early)[1]} comes after {min(late)[1]}")
        evidence.append(f"{state.name}: {max(early)[1]} before {min(late)[1]}")
    if wrong and meaning:
        problems.insert(0, meaning)
    shown = f", e.g. {evidence[0]}" if evidence else ""
    name = kind.order_check(contract.write_first)
    return contract.result(name, problems, f"{len(evidence)} {kind.name} states{shown}")


def mutated_inputs_exactly_states(flow: Flow, contract: ProgramContract) -> CheckResult:
    """The program writes its states, all of them and nothing else, and returns none of them."""
    written = {name for _, _, name in flow.writes_to_inputs()}
    states = {state.name for state in contract.states}
    problems = [f"writes {name}, which is no state" for name in sorted(written - states)]
    problems += [f"never writes {name}" for name in sorted(states - written)]
    returned = [name for value in flow.outputs if (name := flow.input_name(value)) is not None]
    problems += [f"returns {name}" for name in returned]
    return contract.result(
        "mutated_inputs_exactly_states",
        problems,
        f"{len(written)} inputs written, the {len(states)} states; {len(flow.outputs)} output, no state among them",
    )


def no_scalar_read_from_data(flow: Flow, trace: Trace, contract: ProgramContract) -> CheckResult:
    """No number of the program is read from a tensor of data or weights."""
    problems, allowed = [], []
    for index, step in enumerate(flow.steps):
        if step.operator not in SCALAR_READS:
            continue
        read = trace.reads[index]
        if read.data or read.constants & flow.parameters:
            problems.append(f"{step.label} reads {read}")
        allowed.append(f"{step.label} reads {read}")
    evidence = f"{len(allowed)} scalar reads" + (f": {'; '.join(allowed[:3])}" if allowed else "")
    return contract.result("no_scalar_read_from_data", problems, evidence)


def no_tensor_remainder(flow: Flow, contract: ProgramContract) -> CheckResult:
    """No remainder of tensors: runtimes differ in its sign, and phones lack the kernel."""
    found = [step.label for step in flow.steps if step.operator in _REMAINDERS]
    return contract.result("no_tensor_remainder", found, f"none among {len(flow.steps)} steps")
