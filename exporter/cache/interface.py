"""What a cache and its attention must offer, whoever implements them.

Letters: B batch (1), Q query_len, T rows attended to, C capacity, H heads, K KV heads, D head_dim.
Keys and values are ``[B, T, K, D]``, queries ``[B, Q, H, D]``: rows are axis 1 everywhere, so that growing, rewinding
and saving a state never moves anything else.

Two implementations exist: `cache.plain` (aten only; every back end can lower it; eager generation uses it) and
`backends.executorch.cache` (the ``llama::`` operators). Which one a decoder uses is an argument of its constructor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

Rows = tuple[torch.Tensor, torch.Tensor]
"""Keys and values as floats, ``[B, T, K, D]`` each."""
States = tuple[torch.Tensor, ...]
"""The tensors of one layer's state, or rows for each of them, ``[B, T, K, ...]`` (`cache.storage` says which they are).
Caches hand rows to attention in this form: a kernel may read them as they are."""


class KVCache(Protocol):
    """Keys and values of one layer, over tensors the caller owns; every write happens in place."""

    states: States

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> States:
        """A chunk's float rows ``[B, Q, K, D]`` in the form in which the cache keeps them."""
        ...

    def update(self, chunk: States, offset: int) -> None:
        """Write the encoded rows of positions offset .. offset + Q - 1."""
        ...

    def update_and_fetch(self, chunk: States, offset: int) -> States:
        """Write first, then hand out the cache."""
        ...


class RingCache(KVCache, Protocol):
    """A sliding layer's cache: position p lives in row ``p mod C``."""

    window: int

    def fetch_and_concat(self, chunk: States, offset: int) -> States:
        """The rows of the ring as it stands and those of the chunk; nothing is written.

        `concat_mask` knows their order; slots that were never written may be left out."""
        ...

    def concat_mask(self, offset: int, query_len: int) -> torch.Tensor:
        """Which of those rows each query of the chunk sees, bool ``[Q, T]``."""
        ...

    def written(self, rows: States, count: int) -> States:
        """`rows` of the ring, with those that hold none of the first `count` tokens standing for zeros."""
        ...


class Extras:
    """What scores go through besides the mask: scale, tanh softcap, a learned sink per head (``[H]``)."""

    def __init__(self, scale: float, softcap: float | None = None, sinks: torch.Tensor | None = None) -> None:
        self.scale, self.softcap, self.sinks = scale, softcap, sinks

    @property
    def plain_softmax(self) -> bool:
        return self.softcap is None and self.sinks is None


class CacheKernels(Protocol):
    """One implementation of caches together with the attention that suits it."""

    name: str

    def ring(self, states: Sequence[torch.Tensor], window: int) -> RingCache: ...

    def full(self, states: Sequence[torch.Tensor]) -> KVCache: ...

    def attend_masked(self, query: torch.Tensor, rows: States, visible: torch.Tensor, extras: Extras) -> torch.Tensor:
        """Attention under a bool mask ``[Q, T]``, True where visible. Returns ``[B, Q, H, D]``."""
        ...

    def attend_causal(self, query: torch.Tensor, rows: States, offset: int, extras: Extras) -> torch.Tensor:
        """Query i attends to rows 0 .. offset + i; later rows are never read. Returns ``[B, Q, H, D]``."""
        ...


def check_single_query(query_len: int) -> None:
    """Refuse the write-first path for more than one token.

    Raises:
        ValueError: Q > 1. Writing a chunk first would overwrite rows its own early queries still need.
    """
    if query_len != 1:
        raise ValueError(
            f"RingKVCache.update_and_fetch: got query_len {query_len}; expected 1. A ring written before it is read "
            "has lost keys of a chunk's first queries: run chunks through `prefill`, which reads before it writes."
        )
