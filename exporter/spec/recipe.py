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
    """The form of a matrix, or of some of its rows: a code a weight, and what `group_size` of them share.

    Args:
        grid: its name, that of a file of ``exporter.grids``.
        codes: dtype of a code, on a float grid of the weight itself.
        group_size: columns that share a scale; None where all K of a row do.
        scales: dtype of the scales, or of the entries of a palette; None on a float grid.
        zero_points: dtype of the zero points, one beside every scale; None where codes count from 0.
        palette: entries a row chooses from, in place of a scale.
        gptq: whether rounding follows the inputs; otherwise each weight goes to the nearest code.
        rows: the range ``[start, stop)`` that this is the form of; None for all N.
    """

    grid: str
    codes: str
    group_size: int | None = None
    scales: str | None = None
    zero_points: str | None = None
    palette: int | None = None
    gptq: bool = False
    rows: tuple[int, int] | None = None

    @property
    def is_float(self) -> bool:
        return self.codes.startswith("float")

    def bits(self, shape: tuple[int, ...]) -> int:
        """Of a parameter of `shape`, whose last axis is a row: codes, scales, zero points, palettes."""
        columns = shape[-1]
        rows = math.prod(shape[:-1]) if self.rows is None else self.rows[1] - self.rows[0]
        groups = 1 if self.group_size is None else columns // self.group_size
        beside = (self.palette or 1) * dtype_bits(self.scales) + dtype_bits(self.zero_points)
        return rows * (columns * dtype_bits(self.codes) + groups * beside)


def dtype_bits(dtype: str | None) -> int:
    """Of one number, which is what the name of a dtype ends in; of None none."""
    return 0 if dtype is None else int(re.findall(r"\d+$", dtype)[0])


class ParameterSpec(_Sparse):
    """Parameters of one shape that are kept alike.

    Args:
        parameters: their names.
        shape: of each.
        parts: their forms, one after the other by rows.
        gathered: whether a token takes single rows of it: a table that is looked up, not multiplied.
        tied_to: the parameter that it is, in the model; None for one of its own.
        shared: whether it has no bytes but those of `tied_to`; `parts` are then added to what these stand for.
    """

    parameters: tuple[str, ...] = ()
    shape: tuple[int, ...]
    parts: tuple[GridSpec, ...]
    gathered: bool = False
    tied_to: str | None = None
    shared: bool = False

    @property
    def weights(self) -> int:
        """Of all its `parameters`."""
        return len(self.parameters) * math.prod(self.shape)

    @property
    def bits(self) -> int:
        """Of their own, likewise."""
        return len(self.parameters) * sum(part.bits(self.shape) for part in self.parts)


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

    def parts(self, name: str) -> tuple[GridSpec, ...]:
        """The forms that a parameter is kept in, by rows; a shared one's are those of the other."""
        own = self[name]
        return self.parts(own.tied_to) if own.shared and own.tied_to is not None else own.parts

    def grid(self, name: str) -> GridSpec:
        """The form of a parameter that has one for all its rows."""
        (grid,) = self.parts(name)
        return grid

    def is_float(self, name: str) -> bool:
        return all(part.is_float for part in self.parts(name))

    @property
    def rounded(self) -> tuple[str, ...]:
        """The names of those on grids of integers or palettes."""
        return tuple(name for name in self.names if not self.is_float(name))

    @property
    def is_float32(self) -> bool:
        """Whether the program has the very weights of the model."""
        return all(part.codes == "float32" for own in self.kept for part in own.parts)

    @property
    def is_calibrated(self) -> bool:
        """Whether it depends on what the model's inputs look like."""
        return self.smooth or any(part.gptq for own in self.kept for part in own.parts)

    def share_read(self, own: ParameterSpec) -> float:
        """Which share of it a token goes through; the one row of a table is not counted. A program runs every expert
        on every token, whichever its router chooses."""
        return 0.0 if own.gathered else 1.0

    @property
    def weight_bits(self) -> WeightBits:
        """A tied table counts once among the weights, and each byte once among the bits."""
        weights = sum(own.weights for own in self.kept if own.tied_to is None)
        weights_read = sum(own.weights * self.share_read(own) for own in self.kept)
        bits_read = sum(own.bits * self.share_read(own) for own in self.kept)
        return WeightBits(8 * self.stored_bytes / weights, bits_read / weights_read)

    @property
    def stored_bytes(self) -> int:
        """Of all weights, scales included."""
        return sum(own.bits for own in self.kept) // 8

    @property
    def unread_bytes(self) -> int:
        """Of those that a decoded token does not read."""
        return int(sum(own.bits * (1 - self.share_read(own)) for own in self.kept)) // 8
