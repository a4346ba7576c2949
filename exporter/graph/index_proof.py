"""Shows on the exported program that a cache write goes to the row of the definition.

In two ways. A symbolic index is compared with the row of position S - Q as an expression. And the write is run: the
state and the incoming rows hold the position of each row, the graph's own nodes compute the index for concrete lengths,
and afterwards every row must hold the position that the definition puts there.

Letters: Q query_len, S seq_len, C capacity of a ring.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils._sympy.functions import Mod, PythonMod

from exporter.graph.contract import ProgramContract
from exporter.graph.flow import Flow
from exporter.graph.fx_flow import operator_name
from exporter.graph.provenance import Trace
from exporter.spec import CacheKind, StateSpec

NEVER_WRITTEN = -1.0

# Operators that move rows without computing on them.
_MOVES = frozenset(
    {f"aten::{name}" for name in (
        "view", "reshape", "_unsafe_view", "slice", "narrow", "select", "index_select", "transpose", "permute", "cat",
        "clone", "contiguous", "expand", "unsqueeze", "squeeze", "split", "split_with_sizes", "chunk", "to", "_to_copy",
        "alias", "flatten", "unflatten",
    )} | {"python::getitem"}
)  # fmt: skip


class NotPlayable(Exception):
    """A write that this module cannot run; the reason is its text."""


def expression(value: Any) -> sympy.Expr:
    """The expression of a size, an index or a node's value."""
    if isinstance(value, Node):
        value = value.meta.get("val")
    return value.node.expr if isinstance(value, torch.SymInt) else sympy.sympify(value)


def same_index(index: sympy.Expr, expected: sympy.Expr) -> bool:
    """Whether the two are one expression; torch's remainders are the mathematical one, dividends being >= 0."""
    plain = index.replace(PythonMod, sympy.Mod).replace(Mod, sympy.Mod)
    return bool(plain == expected or sympy.expand(plain - expected) == 0)


@dataclass(frozen=True)
class Lengths:
    """Concrete lengths of one call."""

    query_len: int
    seq_len: int

    @property
    def offset(self) -> int:
        return self.seq_len - self.query_len


def sample_lengths(contract: ProgramContract) -> list[Lengths]:
    """Calls around every place where a state that does not grow wraps, and the corners of the declared ranges."""
    query_low, query_high = contract.query
    low, high = contract.sequence
    capacities = _capacities(contract)
    queries = {query_low, query_high, *(q for c in capacities for q in (c, c + 1) if query_low <= q <= query_high)}
    found: dict[tuple[int, int], Lengths] = {}
    for query_len in sorted(queries):
        offsets = {0, high - query_len, *(o for c in capacities for o in (1, c - 1, c, 2 * c + 1))}
        for offset in sorted(offsets):
            if offset >= 0 and low <= offset + query_len <= high:
                found[query_len, offset] = Lengths(query_len, offset + query_len)
    return list(found.values())


def played_lengths(contract: ProgramContract) -> list[Lengths]:
    """The sampled calls within a few turns of the largest ring: later ones repeat them on ever larger states."""
    most = 4 * (_capacities(contract)[-1] + contract.query[1])
    return [one for one in sample_lengths(contract) if one.seq_len <= most]


def _capacities(contract: ProgramContract) -> list[int]:
    """Rows of the states in which positions share rows, from the least on."""
    return sorted({state.rows for state in contract.positional.values() if not state.cache_kind.grows}) or [1]


def expected_rows(state: StateSpec, rows: int, seq_len: int) -> torch.Tensor:
    """The position each row of a state holds after `seq_len` tokens, directly from the definition."""
    return torch.tensor(_replayed(state.cache_kind, rows, seq_len))


@lru_cache(maxsize=256)
def _replayed(kind: CacheKind, rows: int, seq_len: int) -> tuple[float, ...]:
    """Position after position; the same for all states of a kind."""
    held = [NEVER_WRITTEN] * rows
    for position in range(seq_len):
        row = kind.row_of(position, rows)
        if row is not None:
            held[row] = float(position)
    return tuple(held)


@dataclass
class Player:
    """Computes nodes of an exported program for concrete lengths."""

    program: ExportedProgram
    contract: ProgramContract
    flow: Flow
    trace: Trace
    lengths: Lengths
    _memo: dict[Node, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._nodes = {node.name: node for node in self.program.graph.nodes}
        placeholders = [self._nodes[str(name)] for name in self.flow.inputs]
        self._query = expression(placeholders[0].meta["val"].shape[1])
        self._symbols: dict[sympy.Symbol, int] = {}
        for node, tensor in zip(placeholders, self.contract.interface.inputs, strict=True):
            for size, declared in zip(node.meta["val"].shape, tensor.shape, strict=True):
                symbol = expression(size)
                if symbol.is_Symbol:
                    self._symbols[symbol] = self._length(declared)
        self._dirty = {
            self.flow.root(v) for s in self.flow.steps for v in s.writes if self.flow.input_name(v) is None
        }  # fmt: skip

    def _length(self, declared: int | str) -> int:
        inputs = self.contract.interface.inputs
        if declared == inputs[0].shape[1]:
            return self.lengths.query_len
        # Rows of a growing state: the fewest that the call allows.
        return max(self.lengths.seq_len, self.contract.range_of(declared)[0])

    def size(self, value: Any) -> int:
        return int(expression(value).subs(self._symbols))

    def state_after(self, state: StateSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """The positions in the rows of `state` after the call, and the expected ones."""
        name = next(value for value, given in self.flow.inputs.items() if given == state.name)
        node = self._nodes[str(name)]
        shape = [self.size(n) for n in node.meta["val"].shape]
        before = expected_rows(state, shape[1], self.lengths.offset)
        tags = before.view(1, -1, *(1 for _ in shape[2:])).expand(shape).clone()
        memo = dict(self._memo)
        self._memo[node] = tags
        for index, step, written in self.flow.writes_to_inputs():
            if written == state.name:
                if self.trace.positions[index].data:
                    raise NotPlayable(f"{step.label} is placed by {self.trace.positions[index]}")
                self._play(self._nodes[step.label], state.name)
        self._memo = memo
        rows = tags.flatten(2).movedim(1, 0).flatten(1)
        if not bool((rows == rows[:, :1]).all()):
            raise NotPlayable("a row received parts of different positions")
        return rows[:, 0], expected_rows(state, shape[1], self.lengths.seq_len)

    def _play(self, node: Node, state: str) -> None:
        arguments: Any = torch.fx.node.map_arg(node.args, lambda n: self.value(n, state))
        operator, target = operator_name(node), node.target
        if operator == "llama::update_cache":
            value, cache, start = arguments
            self._put(cache, value, torch.arange(start, start + value.shape[1]))
        elif operator == "llama::update_cache_with_indices":
            value, cache, _, slots = arguments
            self._put(cache, value, slots[0])
        else:
            assert callable(target)
            kwargs: Any = torch.fx.node.map_arg(node.kwargs, lambda n: self.value(n, state))
            target(*arguments, **kwargs)

    @staticmethod
    def _put(cache: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        for row, slot in enumerate(slots.tolist()):
            if not 0 <= slot < cache.shape[1]:
                raise NotPlayable(f"row {slot} is outside a state of {cache.shape[1]} rows")
            cache[:, slot] = value[:, row]

    def value(self, node: Node, state: str | None = None) -> Any:
        """The node's value; where it is a computed activation, each row's position instead."""
        if node in self._memo:
            return self._memo[node]
        if self.flow.root(node.name) in self._dirty:
            raise NotPlayable(f"{node.name} is written in place")
        operator, data = operator_name(node), self.trace.of(node.name).data
        if operator == "aten::sym_size":
            result: Any = self.size(node)
        elif node.op == "placeholder" and node.name in self.flow.constants:
            result = self._constant(node)
        elif node.op != "call_function" or (data and not self._moves(node, operator, state)):
            result = self._tagged(node)
        else:
            both: Any = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: self.value(n, state))
            arguments, kwargs = both
            assert callable(node.target)
            result = node.target(*arguments, **kwargs)
        carries_state = state is not None and state in data
        if not carries_state:
            self._memo[node] = result
        return result

    def _moves(self, node: Node, operator: str, state: str | None) -> bool:
        # Between the state and its own rewrite every node is run, for example a `where` over old and new.
        return (operator in _MOVES and not _converts(node)) or self._reaches(node, state)

    def _reaches(self, node: Node, state: str | None) -> bool:
        name = next((v for v, given in self.flow.inputs.items() if given == state), None)
        return any(self.flow.root(n.name) == name for n in node.all_input_nodes)

    def _constant(self, node: Node) -> torch.Tensor:
        name = self.flow.constants[node.name]
        held = self.program.state_dict.get(name, self.program.constants.get(name))
        if not isinstance(held, torch.Tensor):
            raise NotPlayable(f"{name} is not a tensor of the program")
        return held

    def _tagged(self, node: Node) -> torch.Tensor:
        """Rows of an activation: row i of the chunk holds position offset + i."""
        shape = node.meta["val"].shape
        sizes = [self.size(n) for n in shape]
        positions = torch.arange(self.lengths.offset, self.lengths.seq_len, dtype=torch.float32)
        if self.lengths.query_len == 1 and self._query == 1:
            return positions.expand(sizes).clone()
        axes = [axis for axis, n in enumerate(shape) if expression(n) == self._query]
        if 1 in axes:  # the axis of rows by convention; a Q fixed at 2 may equal the number of KV heads too
            axes = [1]
        if len(axes) != 1:
            raise NotPlayable(f"{node.name} has no single axis of Q rows: {tuple(shape)}")
        return positions.view([-1 if axis == axes[0] else 1 for axis in range(len(sizes))]).expand(sizes).clone()


def _converts(node: Node) -> bool:
    """Whether the result has another dtype, in which a position might not fit: int8 rows are computed, not moved."""
    tensors = [value for n in (node, *node.all_input_nodes[:1]) if isinstance(value := n.meta["val"], torch.Tensor)]
    return len({tensor.dtype for tensor in tensors}) > 1


def play_writes(
    program: ExportedProgram, contract: ProgramContract, flow: Flow, trace: Trace, states: tuple[StateSpec, ...]
) -> Iterator[tuple[StateSpec, str]]:
    """Run every write to `states` for the sampled lengths; yields the first problem of each state."""
    open_states = dict.fromkeys(states)
    for lengths in played_lengths(contract):
        player = Player(program, contract, flow, trace, lengths)
        for state in list(open_states):
            where = f"{state.name} at Q={lengths.query_len} S={lengths.seq_len}"
            try:
                got, expected = player.state_after(state)
            except (NotPlayable, RuntimeError, IndexError, ValueError) as error:
                del open_states[state]
                yield state, f"{where}: {error}"
                continue
            wrong = (got != expected).nonzero().flatten().tolist()
            if wrong:
                del open_states[state]
                row = wrong[0]
                yield state, f"{where}: row {row} holds position {got[row]:g}, expected {expected[row]:g}"


def failed_assertions(player: Player) -> list[str]:
    """Run-time assertions over shapes that the declared lengths would trip."""
    failed = []
    for node in player.program.graph.nodes:
        if operator_name(node) != "aten::_assert_scalar" or not isinstance(node.args[0], Node):
            continue
        if player.trace.of(node.args[0].name).data:
            continue
        try:
            holds = bool(player.value(node.args[0]))
        except NotPlayable as reason:
            failed.append(f"{node.args[1]}: {reason}")
            continue
        if not holds:
            failed.append(f"Q={player.lengths.query_len} S={player.lengths.seq_len}: {node.args[1]}")
    return failed
