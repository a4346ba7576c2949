"""The recipe of a program: the form in which it keeps every parameter of the model, and the bits and bytes that follow.

It is worked out once, from the options of a format and the shapes of a model (`exporter.recipe`); whatever rounds,
stores, describes or measures weights reads it.

Letters: N rows, K columns of a matrix.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

from pydantic import SerializerFunctionWrapHandler, model_serializer

from exporter.data import Spec

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


class WeightBits(NamedTuple):
    """Averages over the weights of a model, scales included: `stored` over all of them; `read` over those that every
    token goes through, which are all but an embedding that is not the head's."""

    stored: float
    read: float


class _Sparse(Spec):
    """Written without what has its default: a manifest lists many of these."""

    @model_serializer(mode="wrap")
    def _without_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        return {key: value for key, value in handler(self).items() if getattr(self, key) != fields[key].default}


class GridSpec(_Sparse):
    """The form of a matrix: a code a weight, and what `group_size` of them share.

    Args:
        grid: its name, that of a file of ``exporter.grids``.
        codes: dtype of a code, on a float grid of the weight itself.
        group_size: columns that share a scale; None where all K of a row do.
        scales: dtype of the scales, or of the entries of a palette; None on a float grid.
        zero_points: dtype of the zero points, one beside every scale; None where codes count from 0.
        palette: entries a row chooses from, in place of a scale.
        gptq: whether rounding follows the inputs; otherwise each weight goes to the nearest code.
    """

    grid: str
    codes: str
    group_size: int | None = None
    scales: str | None = None
    zero_points: str | None = None
    palette: int | None = None
    gptq: bool = False

    @property
    def is_float(self) -> bool:
        return self.codes.startswith("float")

    def bits(self, shape: tuple[int, ...]) -> int:
        """Of a parameter of `shape`, whose last axis is a row: codes, scales, zero points, palettes."""
        columns = shape[-1]
        rows = math.prod(shape[:-1])
        groups = 1 if self.group_size is None else columns // self.group_size
        beside = (self.palette or 1) * dtype_bits(self.scales) + dtype_bits(self.zero_points)
        return rows * (columns * dtype_bits(self.codes) + groups * beside)


def dtype_bits(dtype: str | None) -> int:
    """Of one number, which is what the name of a dtype ends in; of None none."""
    return 0 if dtype is None else int(re.findall(r"\d+$", dtype)[0])


class ExactRows(_Sparse):
    """Rows that are multiplied again for a token, those with the largest products: more bits than the other rows have.

    Args:
        count: how many.
        part: their form.
        of: the parameter whose bytes those are; None for bytes of their own.
    """

    count: int
    part: GridSpec
    of: str | None = None


class ParameterSpec(_Sparse):
    """Parameters of one shape that are kept alike.

    Args:
        parameters: their names.
        shape: of each.
        part: their form; None of one that is `shared`.
        gathered: whether a token takes single rows of it: a table that is looked up, not multiplied.
        tied_to: the parameter that it is, in the model; None for one of its own.
        shared: whether it has no bytes but those of `tied_to`.
        exact: of a head, the rows that are multiplied again.
    """

    parameters: tuple[str, ...] = ()
    shape: tuple[int, ...]
    part: GridSpec | None
    gathered: bool = False
    tied_to: str | None = None
    shared: bool = False
    exact: ExactRows | None = None

    @property
    def weights(self) -> int:
        """Of all its `parameters`."""
        return len(self.parameters) * math.prod(self.shape)

    @property
    def bits(self) -> int:
        """Of their own, likewise."""
        own = [] if self.part is None else [self.part]
        own += [self.exact.part] if self.exact is not None and self.exact.of is None else []
        return len(self.parameters) * sum(part.bits(self.shape) for part in own)

    @property
    def read_bits(self) -> int:
        """Of those that a token reads; the one row of a table is not counted. A program runs every expert on every
        token, whichever its router chooses."""
        if self.gathered:
            return 0
        bits = 0 if self.part is None else len(self.parameters) * self.part.bits(self.shape)
        if self.exact is not None:
            bits += self.exact.part.bits((self.exact.count, self.shape[-1]))
        return bits


class Recipe(Spec):
    """Every parameter by its name, ``recipe["layers.0.mixer.q_proj.weight"]``; the head has one whether tied or not.

    `smooth` says that SmoothQuant-style factors were moved between norms and weights before rounding
    (``exporter.quantization.smoothing``).
    """

    smooth: bool = False
    kept: tuple[ParameterSpec, ...]

    @classmethod
    def of(cls, parameters: Mapping[str, ParameterSpec], *, smooth: bool = False) -> Recipe:
        """From the form of each; those that are alike stand together."""
        alike: dict[ParameterSpec, list[str]] = {}
        for name, own in parameters.items():
            alike.setdefault(own, []).append(name)
        kept = (own.model_copy(update={"parameters": tuple(names)}) for own, names in alike.items())
        return cls(smooth=smooth, kept=tuple(kept))

    @cached_property
    def _by_name(self) -> dict[str, ParameterSpec]:
        return {name: own for own in self.kept for name in own.parameters}

    def __getitem__(self, name: str) -> ParameterSpec:
        return self._by_name[name]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def part(self, name: str) -> GridSpec:
        """The form that a parameter is kept in; a shared one's is that of the other."""
        own = self[name]
        if own.part is None:
            assert own.shared and own.tied_to is not None
            return self.part(own.tied_to)
        return own.part

    def is_float(self, name: str) -> bool:
        return self.part(name).is_float

    @property
    def rounded(self) -> tuple[str, ...]:
        """The names of those on grids of integers or palettes."""
        return tuple(name for name in self.names if not self.is_float(name))

    @property
    def is_float32(self) -> bool:
        """Whether the program has the very weights of the model."""
        return all(own.part is None or own.part.codes == "float32" for own in self.kept)

    @property
    def is_calibrated(self) -> bool:
        """Whether it depends on what the model's inputs look like."""
        return self.smooth or any(own.part is not None and own.part.gptq for own in self.kept)

    @property
    def weight_bits(self) -> WeightBits:
        """A tied table counts once among the weights, and each byte once among the bits."""
        weights = sum(own.weights for own in self.kept if own.tied_to is None)
        weights_read = sum(own.weights for own in self.kept if not own.gathered)
        bits_read = sum(own.read_bits for own in self.kept)
        return WeightBits(8 * self.stored_bytes / weights, bits_read / weights_read)

    @property
    def stored_bytes(self) -> int:
        """Of all weights, scales included."""
        return sum(own.bits for own in self.kept) // 8

    @property
    def unread_bytes(self) -> int:
        """Of those that a decoded token does not read."""
        return self.stored_bytes - sum(own.read_bits for own in self.kept) // 8
