"""An exported program as a `Flow`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from exporter.errors import GraphContractError
from exporter.graph.flow import Flow, Step

_SHAPE_ONLY = frozenset(
    {
        "aten::sym_size", "aten::sym_numel", "aten::sym_stride", "aten::size", "aten::numel",
        "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::empty_like", "aten::rand_like",
        "aten::new_zeros", "aten::new_ones", "aten::new_full", "aten::new_empty",
    }
)  # fmt: skip
# In-place operators that do not read what they overwrite.
_PURE_WRITES = frozenset(
    {
        "aten::copy_", "aten::index_copy_", "aten::index_put_", "aten::scatter_", "aten::fill_", "aten::zero_",
        "llama::update_cache", "llama::update_cache_with_indices",
    }
)  # fmt: skip
# Arguments that say where a write, or a gather, goes.
_POSITION_ARGUMENTS = {
    "llama::update_cache": (2,),
    "llama::update_cache_with_indices": (2, 3),
    "aten::copy_": (),
    "aten::index_copy_": (1, 2),
    "aten::index_put_": (1,),
    "aten::scatter_": (1, 2),
    "aten::index_select": (1, 2),
    "aten::gather": (1, 2),
    "aten::index": (1,),
    "aten::where": (0,),
    "aten::slice": (1, 2, 3, 4),
    "aten::narrow": (1, 2, 3),
    "aten::select": (1, 2),
}


def operator_name(node: Node) -> str:
    """Namespace and name without overload; ``python::mod`` for arithmetic on symbolic integers."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name)
    return f"python::{getattr(target, '__name__', target)}"


def written_arguments(node: Node) -> list[Node]:
    """The tensors `node` writes in place, by its schema."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return []
    written: list[Node] = []
    for index, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            written += nodes_in(value)
    return written


def nodes_in(argument: Any) -> list[Node]:
    """The nodes of an argument, which may be nested."""
    found: list[Node] = []
    torch.fx.node.map_arg(argument, found.append)
    return found


def flow_of(program: ExportedProgram, names: tuple[str, ...], *, positions: bool = True) -> Flow:
    """The program as steps, its user inputs called `names`; without `positions`, the values that place a write are left
    out.

    Raises:
        GraphContractError: the program was decomposed already (its writes are no longer in the graph), or does not
            take as many inputs as there are names.
    """
    signature = program.graph_signature
    mutations = [s for s in signature.output_specs if s.kind in _FUNCTIONAL]
    if mutations:
        raise GraphContractError(
            "graph checks",
            got=f"a functionalised program with {len(mutations)} mutation outputs",
            expected="the program torch.export returned, whose writes are still in the graph",
            repair="Check the program before run_decompositions().",
        )
    user_inputs = [s.arg.name for s in signature.input_specs if s.kind is InputKind.USER_INPUT]
    if len(user_inputs) != len(names):
        raise GraphContractError(
            "graph checks",
            got=f"{len(user_inputs)} inputs ({', '.join(user_inputs)})",
            expected=f"{len(names)} ({', '.join(names)})",
            repair="The states are inputs, one each, in the order of the state specs.",
        )
    constants = {
        s.arg.name: s.target or s.arg.name for s in signature.input_specs if s.kind is not InputKind.USER_INPUT
    }
    weights = frozenset(
        constants[s.arg.name]
        for s in signature.input_specs
        if s.kind in (InputKind.PARAMETER, InputKind.BUFFER)
    )  # fmt: skip
    nodes = [n for n in program.graph.nodes if n.op in ("call_function", "get_attr")]
    output = next(n for n in program.graph.nodes if n.op == "output")
    return Flow(
        inputs=dict(zip(user_inputs, names, strict=True)),
        constants=constants,
        parameters=weights,
        scalars=frozenset(n.name for n in program.graph.nodes if not isinstance(n.meta.get("val"), torch.Tensor)),
        steps=tuple(_step(node, positions) for node in nodes),
        outputs=tuple(n.name for n in nodes_in(output.args)),
    )


_FUNCTIONAL = (OutputKind.USER_INPUT_MUTATION, OutputKind.BUFFER_MUTATION)


def _step(node: Node, positions: bool) -> Step:
    operator, arguments, written = operator_name(node), node.all_input_nodes, written_arguments(node)
    read = [n for n in arguments if not (operator in _PURE_WRITES and n in written)]
    shape_only = operator in _SHAPE_ONLY
    # A number given to zeros_like and similar is content; of the tensor only the shape is used.
    sizes = [n for n in read if shape_only and isinstance(n.meta.get("val"), torch.Tensor)]
    return Step(
        label=node.name,
        operator=operator,
        reads=tuple(n.name for n in read if n not in sizes),
        sizes=tuple(n.name for n in sizes),
        results=(node.name,),
        writes=tuple(n.name for n in written),
        positions=tuple(dict.fromkeys(n.name for w in written for n in _positions(node, w))) if positions else (),
        aliases=tuple((node.name, source.name) for source in _aliased(node)),
        data_shaped=_has_unbacked_shape(node),
    )


def _aliased(node: Node) -> list[Node]:
    """The argument whose storage the result shares, by schema; ``getitem`` takes from a list of views."""
    target: Any = node.target
    if operator_name(node) == "python::getitem":
        source = node.args[0]
        return [source] if isinstance(source, Node) and _aliased(source) else []
    if not isinstance(target, torch._ops.OpOverload):
        return []
    shared = [r.alias_info for r in target._schema.returns if r.alias_info is not None]
    if not shared:
        return []
    sets = set().union(*(info.before_set | info.after_set for info in shared))
    for index, argument in enumerate(target._schema.arguments):
        info = argument.alias_info
        if info is not None and (info.before_set & sets) and index < len(node.args):
            return nodes_in(node.args[index])
    return []


def _has_unbacked_shape(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and bool(free_unbacked_symbols(value.shape))


def _positions(node: Node, written: Node) -> Iterator[Node]:
    """The values that place the write: the operator's index, the views it goes through, and the gather that made its
    value.

    An in-place operator this module does not know places its write by all its arguments.
    """
    operator = operator_name(node)
    own = _POSITION_ARGUMENTS.get(operator)
    if own is None:
        yield from (n for n in node.all_input_nodes if n is not written)
    else:
        yield from _arguments(node, own)
    base = written
    while _aliased(base):
        yield from _arguments(base, _POSITION_ARGUMENTS.get(operator_name(base), ()))
        base = _aliased(base)[0]
    if operator == "aten::copy_":
        # A state rewritten from its own old content: the indices of that gather place the write.
        for source in nodes_in(node.args[1]):
            yield from _gather_positions(source, base, {})


def _arguments(node: Node, indices: tuple[int, ...]) -> list[Node]:
    return [n for i in indices if i < len(node.args) for n in nodes_in(node.args[i])]


def _gather_positions(node: Node, state: Node, seen: dict[Node, bool]) -> Iterator[Node]:
    if not _carries(node, state, seen):
        return
    yield from _arguments(node, _POSITION_ARGUMENTS.get(operator_name(node), ()))
    for argument in node.all_input_nodes:
        if argument is not state:
            yield from _gather_positions(argument, state, seen)


def _carries(node: Node, state: Node, seen: dict[Node, bool]) -> bool:
    """Whether the content of `state` reaches `node`."""
    if node not in seen:
        seen[node] = node is state or any(_carries(n, state, seen) for n in node.all_input_nodes)
    return seen[node]
