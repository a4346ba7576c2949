"""The contract of an exported program, before lowering."""

from __future__ import annotations

import math
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from exporter.graph.checks_flow import check_flow
from exporter.graph.contract import ProgramContract, summary
from exporter.graph.flow import Flow
from exporter.graph.fx_flow import flow_of
from exporter.graph.index_proof import (
    Player,
    expression,
    failed_assertions,
    play_writes,
    played_lengths,
    same_index,
    sample_lengths,
)
from exporter.graph.provenance import Trace
from exporter.spec import CheckResult


def check_exported(program: ExportedProgram, contract: ProgramContract) -> list[CheckResult]:
    """Check one program as ``torch.export.export`` returned it.

    Raises:
        GraphContractError: the program cannot be read at all: it was decomposed already, or its inputs are not
            ``input_ids``, ``position_ids`` and one tensor a state.
    """
    flow = flow_of(program, contract.input_names)
    trace = Trace(flow)
    return as_traced(
        [
            *check_flow(flow, trace, contract),
            write_index_is_definition(program, flow, contract),
            writes_land_on_their_rows(program, flow, trace, contract),
            finite_constants(program, flow, contract),
            dynamic_ranges(program, flow, trace, contract),
            last_token_logits_only(program, contract),
        ]
    )


def as_traced(results: list[CheckResult]) -> list[CheckResult]:
    """Checks that were made on a traced program, not on a file."""
    return [result.model_copy(update={"form": "traced"}) for result in results]


def write_index_is_definition(program: ExportedProgram, flow: Flow, contract: ProgramContract) -> CheckResult:
    """Every symbolic start of a write is the row of position S - Q, as an expression.

    A write placed by a tensor, such as a gather, has no symbolic start; only `writes_land_on_their_rows` checks it.
    """
    nodes = {node.name: node for node in program.graph.nodes}
    inputs = [nodes[str(name)] for name in flow.inputs]
    offset = expression(inputs[1].meta["val"].shape[1]) - expression(inputs[0].meta["val"].shape[1])
    states = contract.positional
    problems, shown, tensors = [], set(), 0
    for _, step, name in flow.writes_to_inputs():
        if name not in states:
            continue
        state = states[name]
        start, wanted = _symbolic_start(nodes[step.label]), state.cache_kind.row_of(offset, state.rows)
        if start is None:
            tensors += 1
        elif same_index(start, wanted):
            shown.add(f"{state.kind}: {start}")
        else:
            problems.append(f"{step.label} writes {name} at {start}, expected {wanted}")
    evidence = f"{summary(sorted(shown)) or 'no symbolic start'}; {tensors} writes placed by tensors"
    return contract.result("write_index_is_definition", problems, evidence)


def _symbolic_start(node: Node) -> sympy.Expr | None:
    """The first row a write touches, if the graph has it as a number."""
    target = str(node.target)
    if target.startswith("llama.update_cache"):
        return expression(node.args[2])
    if target.startswith("aten.copy_"):
        base = node.args[0]
        if isinstance(base, Node) and str(base.target).startswith(("aten.slice.", "aten.narrow.")):
            return expression(base.args[2])
        if isinstance(base, Node) and str(base.target).startswith("aten.select."):
            return expression(base.args[2])
    return None


def writes_land_on_their_rows(
    program: ExportedProgram, flow: Flow, trace: Trace, contract: ProgramContract
) -> CheckResult:
    """Computed for concrete lengths, every write puts each position on the row of the definition."""
    states = tuple(contract.positional.values())
    problems = [problem for _, problem in play_writes(program, contract, flow, trace, states)]
    lengths = played_lengths(contract)
    return contract.result(
        "writes_land_on_their_rows", problems, f"{len(states)} states played for {len(lengths)} pairs of lengths"
    )


def finite_constants(program: ExportedProgram, flow: Flow, contract: ProgramContract) -> CheckResult:
    """No infinity or NaN, as an argument or in a constant: half precision and NPU kernels misread them."""
    problems = []
    count = 0
    for node in program.graph.nodes:
        for value in torch.utils._pytree.tree_leaves((node.args, node.kwargs)):
            if isinstance(value, float):
                count += 1
                if not math.isfinite(value):
                    problems.append(f"{node.name} has the argument {value}")
    tensors = 0
    for name in flow.constants.values():
        tensor: Any = program.state_dict.get(name, program.constants.get(name))
        # A quantised weight is a tensor subclass over integers.
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_floating_point():
            tensors += 1
            if not _finite(tensor):
                problems.append(f"{name} holds a value that is not finite")
    return contract.result("finite_constants", problems, f"{count} arguments and {tensors} tensors, all finite")


def _finite(tensor: torch.Tensor) -> bool:
    """Checks the smallest and the largest element, which are NaN if any is; a mask of an embedding would take a
    gigabyte."""
    return tensor.numel() == 0 or all(math.isfinite(bound) for bound in torch.aminmax(tensor.detach()))


def dynamic_ranges(program: ExportedProgram, flow: Flow, trace: Trace, contract: ProgramContract) -> CheckResult:
    """The declared ranges survived: nothing was specialised, and no assertion refuses a declared length."""
    nodes = {node.name: node for node in program.graph.nodes}
    ranges = {symbol: bounds for symbol, bounds in program.range_constraints.items() if isinstance(bounds, ValueRanges)}
    problems: list[str] = []
    seen: dict[str, str] = {}
    symbols: dict[sympy.Symbol, int | str] = {}
    for name, tensor in zip(flow.inputs, contract.interface.inputs, strict=True):
        shape = nodes[str(name)].meta["val"].shape
        for axis, (size, declared) in enumerate(zip(shape, tensor.shape, strict=True)):
            expr, (low, high) = expression(size), contract.range_of(declared)
            where = f"{tensor.name} axis {axis}"
            if not expr.free_symbols:
                if low != high or int(expr) != low:
                    problems.append(f"{where} is fixed at {expr}, declared {low}..{high}")
                continue
            bounds = bound_sympy(expr, ranges)
            if bounds.lower > low or bounds.upper < high:
                problems.append(f"{where} accepts {bounds.lower}..{bounds.upper}, declared {low}..{high}")
            for symbol in expr.free_symbols:
                if symbols.setdefault(symbol, declared) != declared:
                    problems.append(f"{where} is tied to {symbols[symbol]}: {expr}")
            seen[str(declared)] = f"{declared} {bounds.lower}..{bounds.upper}"
    lengths = sample_lengths(contract)
    for one in lengths if not problems else []:
        problems += failed_assertions(Player(program, contract, flow, trace, one))
    shown = ", ".join(seen.values()) or "no dynamic dimension"
    return contract.result(
        "dynamic_ranges", problems, f"{shown}; run-time assertions hold for {len(lengths)} pairs of lengths"
    )


def last_token_logits_only(program: ExportedProgram, contract: ProgramContract) -> CheckResult:
    """The one output is ``[1, V]``, and nothing on the way has V and Q among its axes."""
    vocab = contract.vocab_size
    output = next(n for n in program.graph.nodes if n.op == "output")
    results = [n.meta["val"] for n in output.all_input_nodes]
    shapes = [tuple(value.shape) for value in results]
    problems = []
    if contract.last_token_only:
        if [tuple(map(str, shape)) for shape in shapes] != [("1", str(vocab))]:
            problems.append(f"the outputs are {shapes}, expected one of [1, {vocab}]")
        for node in program.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and vocab in value.shape:
                others = [n for n in value.shape if not isinstance(n, int)]
                if others:
                    problems.append(f"{node.name} is {tuple(value.shape)}")
    return contract.result("last_token_logits_only", problems, f"output {shapes}, vocabulary {vocab}")
