"""Which stored tensors make which parameters: a table of pieces, and the steps that lead from the one to the other.

A *piece* says what one stored tensor brings to one parameter: the steps to take, and the place of the result if the
parameter is made of several parts. Steps work both ways, as a lens does: `take` gets a part out of a stored tensor,
`put` sets it there again, and ``put(x, take(x)) == x``. Shapes are never stated: they are what `take` gives on the meta
device.

Letters: N rows (the first axis) of a stored tensor, D its other axes, E experts or layers stacked on the first axis.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import torch

from exporter.spec import LayerSpec, ModelSpec


class MisfitError(Exception):
    """A stored tensor is not of a shape that a step takes; the text goes on from "it is [..], "."""


def _fits(condition: bool, otherwise: str) -> None:
    if not condition:
        raise MisfitError(otherwise)


class Step(ABC):
    """One step from a stored tensor towards a parameter."""

    @abstractmethod
    def take(self, x: torch.Tensor) -> torch.Tensor:
        """The part of `x`, a view of it where that can be.

        Raises:
            MisfitError: `x` has another shape than the step is made for.
        """

    @abstractmethod
    def put(self, x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """`x` (overwritten, or unused) with `part` where `take` gets it from."""


class _View(Step):
    """A step whose part is a view of the stored tensor."""

    def put(self, x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        self.take(x).copy_(part)
        return x


@dataclass(frozen=True)
class Rows(_View):
    """Rows `start` to `stop` of the `of` there must be: ``[of, D]`` to ``[stop - start, D]``.

    As a piece's first step it is what is read of the file: the other rows are not. `single` drops the axis, for one
    entry of a stack: ``[E, D]`` to ``[D]``.
    """

    start: int
    stop: int
    of: int
    single: bool = False

    def take(self, x: torch.Tensor) -> torch.Tensor:
        _fits(x.ndim > 0 and x.shape[0] == self.of, f"not of {self.of} rows")
        rows = x[self.start : self.stop]
        return rows.squeeze(0) if self.single else rows


@dataclass(frozen=True)
class Interleaved(_View):
    """Every `step`-th row from `offset` on: ``[N, D]`` to ``[N / step, D]``."""

    step: int
    offset: int

    def take(self, x: torch.Tensor) -> torch.Tensor:
        _fits(x.ndim > 0 and x.shape[0] % self.step == 0, f"not of a multiple of {self.step} rows")
        return x[self.offset :: self.step]


@dataclass(frozen=True)
class Transposed(_View):
    """The last two axes change places: ``[.., A, B]`` to ``[.., B, A]``."""

    def take(self, x: torch.Tensor) -> torch.Tensor:
        _fits(x.ndim >= 2, "not a matrix or a stack of them")
        return x.transpose(-2, -1)


@dataclass(frozen=True)
class PermutedRows(Step):
    """Rows in another order in each of `groups` groups: row j of a group is what was its row ``order[j]``.

    ``[groups * len(order), D]`` to the same shape.
    """

    groups: int
    order: tuple[int, ...]

    def __post_init__(self) -> None:
        assert sorted(self.order) == list(range(len(self.order))), "an order names every row once"

    def take(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.groups * len(self.order)
        _fits(x.ndim > 0 and x.shape[0] == rows, f"not of {rows} rows")
        return x.unflatten(0, (self.groups, -1))[:, list(self.order)].flatten(0, 1)

    def put(self, x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        places = [0] * len(self.order)
        for new, old in enumerate(self.order):
            places[old] = new
        return PermutedRows(self.groups, tuple(places)).take(part)


@dataclass(frozen=True)
class Add(Step):
    """``x + value``. Back it is ``part - value``, exact as far as that is in floats."""

    value: float

    def take(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.value

    def put(self, x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        return part - self.value


@dataclass(frozen=True)
class Times(Step):
    """``x * value``. Back it is ``part / value``, exact as far as that is in floats."""

    value: float

    def take(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.value

    def put(self, x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        return part / self.value


@dataclass(frozen=True)
class Join(ABC):
    """Makes one tensor of a stored one and those stored `beside` it, before the steps; it has no way back.

    A first step `Rows` is taken on all of them. `beside` are keys of the same table, in a layer without its prefix.
    `raw`: the tensors are stored, and arrive, as bytes (uint8), not as floats.
    """

    beside: tuple[str, ...]
    raw: ClassVar[bool] = False

    @abstractmethod
    def take(self, x: torch.Tensor, *beside: torch.Tensor) -> torch.Tensor:
        """One float32 tensor. Raises `MisfitError` as a step does."""


@dataclass(frozen=True)
class Mxfp4(Join):
    """Blocks of 32 four-bit floats (E2M1) with a power of two each, as GPT-OSS stores them (OCP MX, version 1.0).

    Blocks uint8 ``[.., N, D/32, 16]``, the low nibble first, and beside them scales uint8 ``[.., N, D/32]``, the
    exponent plus 127, to float32 ``[.., N, D]``.
    """

    raw: ClassVar[bool] = True
    _MAGNITUDES: ClassVar[tuple[float, ...]] = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

    def take(self, x: torch.Tensor, *beside: torch.Tensor) -> torch.Tensor:
        (scales,) = beside
        _fits(x.ndim >= 3 and x.shape[-1] == 16, "not blocks of 16 bytes")
        _fits(x.shape[:-1] == scales.shape, f"with scales {list(scales.shape)}, not one a block")
        values = torch.tensor([*self._MAGNITUDES, *(-m for m in self._MAGNITUDES)], device=x.device)
        nibbles = torch.stack([x & 15, x >> 4], -1).flatten(-2)
        return torch.ldexp(values[nibbles.long()], scales[..., None].int() - 127).flatten(-2)


@dataclass(frozen=True)
class Piece:
    """What a stored tensor brings to `parameter`: `join`, then `steps` one after the other.

    `part` is None when that is the whole parameter. Otherwise the parts of a parameter, in the order of their numbers
    (from 0), stand one below the other on its first axis; a part with an axis less is one entry of it.
    """

    parameter: str
    steps: tuple[Step, ...] = ()
    part: int | None = None
    join: Join | None = None

    @property
    def beside(self) -> tuple[str, ...]:
        return () if self.join is None else self.join.beside

    def take(self, *stored: torch.Tensor) -> torch.Tensor:
        """The piece of its stored tensor and those beside it, whole.

        Raises:
            MisfitError: of shapes the steps are not made for.
        """
        steps, window = self.steps, self.window
        if window is not None:
            stored, steps = tuple(window.take(x) for x in stored), steps[1:]
        x = stored[0] if self.join is None else self.join.take(*stored)
        for step in steps:
            x = step.take(x)
        return x

    def put(self, stored: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """`stored` (overwritten) with `part` where `take` gets it from."""
        assert self.join is None, f"{self.parameter}: what was joined cannot be taken apart"
        return _put(self.steps, stored, part)

    @property
    def window(self) -> Rows | None:
        """The rows of its stored tensors that it needs; None for all of them."""
        return self.steps[0] if self.steps and isinstance(self.steps[0], Rows) else None

    def within_window(self) -> Piece:
        """The same piece of those rows alone."""
        window = self.window
        if window is None:
            return self
        rows = window.stop - window.start
        return replace(self, steps=(replace(window, start=0, stop=rows, of=rows), *self.steps[1:]))


def _put(steps: tuple[Step, ...], x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    if not steps:
        return part
    return steps[0].put(x, _put(steps[1:], steps[0].take(x), part))


Entry = str | Piece | Sequence[Piece]
"""What a stored tensor brings; a name alone is the whole parameter as stored, no pieces are knowingly nothing."""
Names = Mapping[str, Entry]
"""Stored key -> what it brings; of a layer both without the layer's prefix."""


def entry(index: int, of: int) -> Rows:
    """One of the `of` entries of a stack, ``[of, D]`` to ``[D]``; as a first step all that is read."""
    return Rows(index, index + 1, of, single=True)


def split(sizes: Mapping[str, int]) -> tuple[Piece, ...]:
    """A tensor whose rows are those of several parameters, one after the other: parameter -> rows."""
    pieces: list[Piece] = []
    start, total = 0, sum(sizes.values())
    for parameter, rows in sizes.items():
        pieces.append(Piece(parameter, (Rows(start, start + rows, total),)))
        start += rows
    return tuple(pieces)


def unstacked(num: int, parameter: str, *steps: Step, join: Join | None = None) -> tuple[Piece, ...]:
    """A stack ``[E, ..]`` read an entry at a time, each through `steps`, into a parameter that is a stack of `num`."""
    return tuple(Piece(parameter, (entry(e, num), *steps), e, join) for e in range(num))


def one_by_one(num: int, key: str, parameter: str, *steps: Step) -> dict[str, Piece]:
    """`num` stored tensors, `key` with ``{}`` for their number, that make one parameter that is a stack of `num`."""
    return {key.format(e): Piece(parameter, steps, e) for e in range(num)}


def stepped(names: Mapping[str, str], *steps: Step) -> dict[str, Piece]:
    """`names`, each through the same steps."""
    return {key: Piece(parameter, steps) for key, parameter in names.items()}


def half_split(heads: int, head_dim: int) -> PermutedRows:
    """Rows whose rotary pairs are adjacent in each head, ``[r0 i0 r1 i1 ..]``, to halves ``[r0 r1 .. i0 i1 ..]``."""
    return PermutedRows(heads, (*range(0, head_dim, 2), *range(1, head_dim, 2)))


@dataclass(frozen=True)
class TensorTable:
    """All that the checkpoints of one model may store.

    Attributes:
        pieces: key -> what it brings. A parameter may be named by several keys, of which a checkpoint has one.
        prefixes: what may stand before a key; the first that does is cut off.
        ignored: patterns of whole names that are left out knowingly.
        constants: pattern of a parameter's name -> the value it is filled with when no tensor brings it.
    """

    pieces: Mapping[str, tuple[Piece, ...]]
    prefixes: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    constants: Mapping[str, float] = field(default_factory=dict)

    def key(self, name: str) -> str:
        """The key of the tensor that a file calls `name`."""
        return name.removeprefix(next((prefix for prefix in self.prefixes if name.startswith(prefix)), ""))

    def is_ignored(self, name: str) -> bool:
        """True for a tensor that carries nothing the decoder needs."""
        return self.pieces.get(self.key(name)) == () or any(re.fullmatch(pattern, name) for pattern in self.ignored)

    def knows(self, name: str) -> bool:
        """Whether a stored tensor of that name brings a parameter, or stands beside one that does."""
        key = self.key(name)
        return key in self.pieces or any(key in piece.beside for pieces in self.pieces.values() for piece in pieces)

    def is_raw(self, name: str) -> bool:
        """True for a tensor that is stored as bytes."""
        return self.key(name) in self._raw

    def brings(self, name: str, parameter: str) -> bool:
        """True for a tensor that a part of `parameter` is taken from."""
        return any(piece.parameter == parameter for piece in self.pieces.get(self.key(name), ()))

    def constant(self, parameter: str) -> float | None:
        return next((value for pattern, value in self.constants.items() if re.fullmatch(pattern, parameter)), None)

    @cached_property
    def _raw(self) -> frozenset[str]:
        joined = [(key, piece) for key, pieces in self.pieces.items() for piece in pieces if piece.join is not None]
        return frozenset(k for key, piece in joined for k in (key, *piece.beside) if piece.join and piece.join.raw)

    @cached_property
    def parts(self) -> Mapping[str, Mapping[int, str]]:
        """Parameter -> number of each of its parts -> a key that brings it."""
        parts: dict[str, dict[int, str]] = {}
        for key, pieces in self.pieces.items():
            for piece in pieces:
                if piece.part is not None:
                    parts.setdefault(piece.parameter, {}).setdefault(piece.part, key)
        for parameter, numbers in parts.items():
            assert sorted(numbers) == list(range(len(numbers))), f"{parameter} has parts {sorted(numbers)}"
        return parts


def tensor_table(
    spec: ModelSpec,
    layer: Callable[[LayerSpec], Names],
    top: Names,
    *,
    layers: str,
    prefixes: tuple[str, ...] = (),
    ignored: tuple[str, ...] = (),
    constants: Mapping[str, float] | None = None,
) -> TensorTable:
    """The table of a decoder.

    Args:
        spec: the model.
        layer: what the tensors of a layer bring; keys and parameters without ``<layers>.i.`` and ``layers.i.``.
        top: what the others bring.
        layers: what the checkpoint calls its layers: ``layers``, ``blk``.
        prefixes, ignored, constants: as in `TensorTable`.
    """
    pieces = {key: _pieces(value, "", "") for key, value in top.items()}
    for i, layer_spec in enumerate(spec.layers):
        at = f"{layers}.{i}."
        for key, value in layer(layer_spec).items():
            pieces[at + key] = _pieces(value, f"layers.{i}.", at)
    return TensorTable(pieces, prefixes, ignored, constants or {})


def _pieces(value: Entry, parameter: str, at: str) -> tuple[Piece, ...]:
    """`value` with the names of one layer: `parameter` before the parameters', `at` before the keys'."""
    if isinstance(value, str):
        return (Piece(parameter + value),)
    pieces = (value,) if isinstance(value, Piece) else value
    return tuple(
        replace(
            piece,
            parameter=parameter + piece.parameter,
            join=piece.join and replace(piece.join, beside=tuple(at + key for key in piece.beside)),
        )
        for piece in pieces
    )
