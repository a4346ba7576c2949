"""The plan that pairs stored tensors with the parts of parameters, before any data is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from exporter.errors import CheckpointError
from exporter.families.tensors import MisfitError, Piece, TensorTable

_SHOWN = 5
Shape = tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint: where it is, its shape as torch sees it, and whether it is bytes, not floats."""

    key: str
    file: str
    shape: Shape
    raw: bool = False


@dataclass(frozen=True)
class Source:
    """A piece, the stored tensor it is taken from with those beside it, and the shape it has then."""

    piece: Piece
    tensors: tuple[StoredTensor, ...]
    shape: Shape

    @property
    def key(self) -> str:
        return self.tensors[0].key

    def rows(self, axes: int) -> int:
        """How many rows it makes up of a parameter with so many axes; with one less it is one row."""
        return 1 if len(self.shape) < axes else self.shape[0]


Plan = dict[str, tuple[Source, ...]]
"""Parameter -> what it is made of, in order; nothing for one that is filled with a constant."""


def _several(items: Iterable[str]) -> str:
    items = list(items)
    more = f", and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return "; ".join(items[:_SHOWN]) + more


@dataclass
class _Problems:
    """What is wrong, by kind, in the order in which it is said."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    overlapping: list[str] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)
    misshaped: list[str] = field(default_factory=list)

    def raise_any(self, name: str) -> None:
        kinds = (
            ("missing tensors", self.missing, "every parameter of the model"),
            ("unexpected tensors", self.unexpected, "only the model's own"),
            ("tensors stored twice", self.twice, "each once"),
            ("overlapping parameters", self.overlapping, "each part of a parameter once"),
            ("incomplete parameters", self.incomplete, "every part of a parameter"),
            ("misshaped tensors", self.misshaped, "the shapes the model's config implies"),
        )
        if wrong := [(f"{len(items)} {kind} ({_several(items)})", want) for kind, items, want in kinds if items]:
            raise CheckpointError(
                f"checkpoint {name}",
                got="; ".join(got for got, _ in wrong),
                expected=", ".join(want for _, want in wrong),
                repair="The weights do not belong to this config: fetch both again, from one place.",
            )


def _source(piece: Piece, tensors: tuple[StoredTensor, ...]) -> Source:
    """Raises `MisfitError` when a step does not take such a tensor."""
    dtypes = (torch.uint8 if tensor.raw else torch.float32 for tensor in tensors)
    stored = (torch.empty(t.shape, dtype=dtype, device="meta") for t, dtype in zip(tensors, dtypes, strict=True))
    return Source(piece, tensors, tuple(piece.take(*stored).shape))


def plan(name: str, stored: Iterable[StoredTensor], table: TensorTable, expected: Mapping[str, Shape]) -> Plan:
    """Make up every expected parameter of stored tensors, each part of it of exactly one.

    Args:
        name: the checkpoint, for messages.
        stored: its tensors, the knowingly ignored ones left out.
        table: what they bring.
        expected: canonical name -> shape.

    Raises:
        CheckpointError: tensors are missing, unexpected, stored twice or misshaped, parameters overlapping or
            incomplete; all of a kind in one error.
    """
    problems = _Problems()
    stored = list(stored)
    by_key = {table.key(tensor.key): tensor for tensor in stored}
    found: dict[str, list[Source]] = {}
    misfits: set[str] = set()
    for tensor in stored:
        key = table.key(tensor.key)
        pieces = table.pieces.get(key, ())
        if not (pieces or key in table.beside) or any(piece.parameter not in expected for piece in pieces):
            problems.unexpected.append(f"{tensor.key} in {tensor.file}")
            continue
        for piece in pieces:
            if absent := [other for other in piece.beside if other not in by_key]:
                problems.missing.append(f"{', '.join(absent)} beside {tensor.key}")
                misfits.add(piece.parameter)
                continue
            try:
                source = _source(piece, (tensor, *(by_key[other] for other in piece.beside)))
            except MisfitError as misfit:
                problems.misshaped.append(f"{tensor.key} in {tensor.file} is {list(tensor.shape)}, {misfit}")
                misfits.add(piece.parameter)
            else:
                found.setdefault(piece.parameter, []).append(source)
    result: Plan = {}
    for parameter, shape in expected.items():
        sources = found.get(parameter, [])
        result[parameter] = tuple(sorted(sources, key=lambda source: source.piece.part or 0))
        if parameter in misfits:
            continue  # said already
        if sources:
            _check(parameter, tuple(shape), sources, table, problems)
        elif table.constant(parameter) is None:
            problems.missing.append(f"{parameter} {list(shape)}")
    problems.raise_any(name)
    return result


def _check(parameter: str, shape: Shape, sources: list[Source], table: TensorTable, problems: _Problems) -> None:
    """Whether `sources` are the whole of `parameter`, once, and of its shape."""
    first: dict[int | None, Source] = {}
    for source in sources:
        part = source.piece.part
        other = first.setdefault(part, source)
        if other is not source and part is None:
            problems.twice.append(f"{parameter} as {other.key} and as {source.key}")
        elif other is not source:
            problems.overlapping.append(f"part {part} of {parameter} as {other.key} and as {source.key}")
    whole = first.pop(None, None)
    if whole is not None and first:
        problems.overlapping.append(f"{parameter} as {whole.key} and in parts as {next(iter(first.values())).key}")
    if whole is not None:
        _check_shape(whole, shape, problems)
        return
    if lacking := [key for part, key in table.parts[parameter].items() if part not in first]:
        problems.incomplete.append(f"{parameter} {list(shape)} without {', '.join(lacking[:_SHOWN])}")
        return
    for source in first.values():
        entry = len(source.shape) < len(shape)
        _check_shape(source, shape[1:] if entry else (*source.shape[:1], *shape[1:]), problems)
    rows = sum(source.rows(len(shape)) for source in first.values())
    if rows != shape[0]:
        problems.misshaped.append(f"{len(first)} parts of {parameter} are {rows} rows, not {shape[0]}")


def _check_shape(source: Source, shape: Shape, problems: _Problems) -> None:
    if source.shape != shape:
        stored = source.tensors[0]
        gives = f", which gives {list(source.shape)} for {source.piece.parameter}" if source.piece.steps else ""
        problems.misshaped.append(f"{stored.key} in {stored.file} is {list(stored.shape)}{gives}, not {list(shape)}")
