"""Shows that every write of a Core AI function goes to the rows of the definition, computed from the function itself.

Letters: Q query_len, S seq_len, C capacity of a ring.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from exporter.backends.coreai.file import Function
from exporter.backends.coreai.flow import LayerWrite, StateFlow, carried, layer_name
from exporter.backends.coreai.values import Values, region
from exporter.graph.contract import ProgramContract
from exporter.graph.index_proof import Lengths, NotPlayable, expected_rows, played_lengths, sample_lengths
from exporter.spec import CheckResult, StateSpec


def write_index_is_definition(function: Function, flow: StateFlow, contract: ProgramContract) -> CheckResult:
    """A write of rows covers exactly those of positions S - Q .. S - 1 (``(S - Q) mod C`` of a ring), computed from the
    function's own integers for sampled lengths.

    A ring rewritten by a gather covers all of its rows; `writes_land_on_their_rows` checks which row comes from where.
    """
    states = contract.positional
    problems, shown = [], set()
    for write in flow.writes:
        state = states.get(layer_name(write.state, write.layer))
        if state is None:
            continue
        for lengths in sample_lengths(contract):
            shapes = shapes_of(function, contract, lengths)
            values, rows = Values(function, shapes), shapes[write.state][1]
            try:
                got = written_rows(values, write, rows)
            except NotPlayable as reason:
                problems.append(f"{write.label} to {state.name}: {reason}")
                break
            kind = state.cache_kind
            in_a_row = kind.grows or contract.write_first
            first = kind.row_of(lengths.offset, rows) if in_a_row else None
            if first is None:
                want, words = range(rows), "all of it, by a gather"
            else:
                want, words = range(first, first + lengths.query_len), f"Q rows from {kind.first_row}"
            if got != want:
                where = f"Q={lengths.query_len} S={lengths.seq_len}"
                problems.append(f"{write.label} writes {got} of {state.name} at {where}, expected {want}")
                break
            shown.add(f"{kind.name}: {words}")
    evidence = f"{len(flow.writes)} writes: {'; '.join(sorted(shown)) or 'none'}"
    return contract.result("write_index_is_definition", problems, evidence)


def written_rows(values: Values, write: LayerWrite, rows: int) -> range:
    """The rows of its layer that a write covers."""
    if write.begin is None or write.end is None:
        return range(rows)
    begin, end = values(write.begin), values(write.end)
    return range(*slice(int(begin[1]), int(end[1])).indices(rows))


def shapes_of(function: Function, contract: ProgramContract, lengths: Lengths) -> dict[str, tuple[int, ...]]:
    """The concrete shape of every argument in a call of these lengths; a growing state has as few rows as possible."""
    ids = zip(function.inputs, (lengths.query_len, lengths.seq_len), strict=True)
    shapes: dict[str, tuple[int, ...]] = {argument.name: (1, n) for argument, n in ids}
    rows = max(lengths.seq_len, contract.interface.dims.get("rows", (1, 1))[0])
    for argument in function.states:
        shapes[argument.name] = tuple(rows if n is None else n for n in argument.type.shape)
    return shapes


def writes_land_on_their_rows(function: Function, flow: StateFlow, contract: ProgramContract) -> CheckResult:
    """Computed for concrete lengths: every row of a layer and of the chunk holds its position, and after the function's
    own operators every position is on the row that the definition gives it."""
    states = dict(contract.positional)
    problems, lengths = [], played_lengths(contract)
    for write in flow.writes:
        state = states.pop(layer_name(write.state, write.layer), None)
        if state is None:
            continue
        for one in lengths:
            try:
                problem = play(function, flow, write, state, shapes_of(function, contract, one))
            except (NotPlayable, ValueError, IndexError) as reason:
                problem = str(reason)
            if problem is not None:
                problems.append(f"{state.name} at Q={one.query_len} S={one.seq_len}: {problem}")
                break
    problems += [f"{name} is never written" for name in states]
    played = f"{len(contract.positional)} layers played for {len(lengths)} pairs of lengths"
    return contract.result("writes_land_on_their_rows", problems, played)


def play(
    function: Function, flow: StateFlow, write: LayerWrite, state: StateSpec, shapes: Mapping[str, tuple[int, ...]]
) -> str | None:
    """What is wrong with the rows that one write leaves in a call with these shapes, if anything."""
    lengths = Lengths(*(shapes[argument.name][1] for argument in function.inputs))
    count, rows, *row = shapes[write.state]
    before = expected_rows(state, rows, lengths.offset).numpy()
    column = [1] * len(row)
    given: dict[int, np.ndarray] = {}
    for value, name in flow.stacks.items():
        if name == write.state:
            given[value] = np.broadcast_to(before.reshape(1, rows, *column), (count, rows, *row))
    positions = np.arange(lengths.offset, lengths.seq_len, dtype=np.float32)
    for value in chunks(function, flow, write):
        given[value] = np.broadcast_to(positions.reshape(1, -1, *column), (1, lengths.query_len, *row))
    values = Values(function, shapes, given)
    update = values(write.update)
    after = np.array(np.broadcast_to(before.reshape(1, rows, *column), (1, rows, *row)))
    if write.begin is None or write.end is None:
        after[:] = update
    else:
        begin, end = values(write.begin).copy(), values(write.end).copy()
        begin[0], end[0] = 0, 1
        after[region(after.shape, begin, end)] = update
    flat = after.reshape(rows, -1)
    if not (flat == flat[:, :1]).all():
        return "a row received parts of different positions"
    wrong = np.flatnonzero(flat[:, 0] != expected_rows(state, rows, lengths.seq_len).numpy())
    if len(wrong) == 0:
        return None
    first = int(wrong[0])
    want = expected_rows(state, rows, lengths.seq_len)[first]
    return f"row {first} holds position {flat[first, 0]:g}, expected {want:g}"


def chunks(function: Function, flow: StateFlow, write: LayerWrite) -> Iterator[int]:
    """The activations in an update: its inputs except the layer's own old rows and integers."""
    carrying = carried(function, flow, write.state, write.layer)
    open_values, seen = [write.update], set()
    while open_values:
        value = open_values.pop()
        if value in seen or value in flow.stacks:
            continue
        seen.add(value)
        kind = function.types.get(value)
        if value in carrying:
            open_values += function.producers[value].operands
        elif kind is not None and not kind.is_integer and len(kind.shape) > 1:
            yield value
