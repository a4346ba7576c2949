"""How a layer's rows are kept in the caller's tensors: as they are, rounded to float16, or as int8 with a scale for
each row and KV head.

Letters: B batch (1), T rows, K KV heads, D head_dim.

A chunk is encoded once, on its way in; what attention sees of it is what the cache will hold, its own newest rows
included. So a token's keys and values are the same numbers to every later query and to itself, and how a prompt is cut
into chunks changes nothing: prefill attends to the encoded chunk, exactly as decode attends to the row it just wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from exporter.cache.interface import Rows, States

LARGEST = 127  # symmetric: -128 is never stored


class Storage(Protocol):
    """Translates between float rows and the tensors of one layer's state."""

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> States:
        """Float rows ``[B, T, K, D]`` to one tensor for each of the layer's states, in the order of the plan."""
        ...

    def decode(self, states: Sequence[torch.Tensor]) -> Rows:
        """Float keys and values ``[B, T, K, D]`` of as many rows as `states` have."""
        ...

    def round_query(self, query: torch.Tensor) -> torch.Tensor:
        """What plain softmax attention over such rows makes of float queries ``[B, Q, H, D]``, as floats."""
        ...


class FloatRows:
    """States: keys and values ``[B, T, K, D]`` float32, as they are."""

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> States:
        return keys, values

    def decode(self, states: Sequence[torch.Tensor]) -> Rows:
        keys, values = states
        return keys, values

    def round_query(self, query: torch.Tensor) -> torch.Tensor:
        return query


class Int8Rows:
    """States: keys int8 ``[B, T, K, D]``, their scales float32 ``[B, T, K, 1]``, values and their scales likewise.

    Queries are rounded as keys are: a kernel that reads the integers multiplies them with integers.
    """

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> States:
        return (*quantize_rows(keys), *quantize_rows(values))

    def decode(self, states: Sequence[torch.Tensor]) -> Rows:
        keys, key_scales, values, value_scales = states
        return self.dequantize(keys, key_scales), self.dequantize(values, value_scales)

    def dequantize(self, integers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Integer times scale, float32 ``[B, T, K, D]``."""
        return integers * scales

    def round_query(self, query: torch.Tensor) -> torch.Tensor:
        scales = row_scales(query)
        return torch.round(query / scales) * scales


class HalfRows:
    """States: keys and values ``[B, T, K, D]`` float16; `decoded` is the dtype in which attention computes."""

    def __init__(self, decoded: torch.dtype = torch.float32) -> None:
        self.decoded = decoded

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> States:
        return keys.to(torch.float16), values.to(torch.float16)

    def decode(self, states: Sequence[torch.Tensor]) -> Rows:
        keys, values = states
        return keys.to(self.decoded), values.to(self.decoded)

    def round_query(self, query: torch.Tensor) -> torch.Tensor:
        return query


def row_scales(rows: torch.Tensor) -> torch.Tensor:
    """``max |x| / 127`` of every row and head, float32 ``[B, T, K, 1]``.

    A row of zeros gets the smallest normal number as its scale, which divides 0 to 0.
    """
    # A float, or lowering would convert the number anew in every call.
    return (rows.abs().amax(-1, keepdim=True) / float(LARGEST)).clamp(min=torch.finfo(torch.float32).tiny)


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric per row and head: int8 ``[B, T, K, D]`` and the float32 scales of `row_scales`.

    Nothing is clamped: ``|x| / scale`` exceeds 127 by a rounding at most.
    """
    scales = row_scales(rows)
    return torch.round(rows / scales).to(torch.int8), scales
