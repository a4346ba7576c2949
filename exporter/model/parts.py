"""The exchangeable parts of a layer: what mixes its tokens, and its feed-forward. Each is built from its own spec.

A part's class names the spec it computes, ``class Attention(Mixer, spec=AttentionSpec)``, and is found by that; every
module of this package is imported to look for it.

Letters: Q query_len, S seq_len, D hidden_size, K input channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

import exporter.model
from exporter.cache.interface import CacheKernels
from exporter.spec import RopeSpec, Spec, StateSpec

Rotary = tuple[torch.Tensor, torch.Tensor]
"""cos and sin of the positions of a call, ``[1, Q, 1, R/2]``."""


@dataclass(frozen=True)
class Call:
    """What every layer is told of a call.

    Attributes:
        query_len: Q, its tokens; symbolic while a program is traced, as is `offset`.
        offset: S - Q, the tokens before it.
        write_first: whether rings are written before they are read, which takes exactly one token.
        rotary: what each rotary table of the model says for the positions of the call; None, for no rotation, is there
            too.
    """

    query_len: int
    offset: int
    write_first: bool
    rotary: Mapping[RopeSpec | None, Rotary | None]


class Site(NamedTuple):
    """An input ``[1, Q, K]`` that linears of a part share: its name is that of the first of them.

    What it is divided by, channel by channel, these linears' columns may be multiplied by, if whatever makes the input
    absorbs the division.

    Attributes:
        linears: the names of the linears, within the part.
        source: the linear of the part of whose output every channel is a factor; None: the norm before the part.
        rows: which of the source's rows those are.
        groups: into how many heads these rows are cut. Each head serves equally many heads of the input, one after the
            other.
    """

    linears: tuple[str, ...]
    source: str | None = None
    rows: slice = slice(None)
    groups: int = 1


class Part(torch.nn.Module):
    """A part of a layer, registered for the spec that its class names."""

    of: ClassVar[dict[type[Spec], type[Part]]] = {}

    def __init_subclass__(cls, spec: type[Spec] | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if spec is not None:
            Part.of[spec] = cls

    @property
    def sites(self) -> Sequence[Site]:
        """The inputs of its linears, each after what it depends on; linears that are in none are left as they are."""
        return ()


class Mixer(Part):
    """Mixes tokens over time, over states that the caller owns.

    Args:
        spec: what to build.
        hidden_size: D.
        norm_eps: of norms inside.
        kernels: the cache implementation; it may be exchanged at any time.
        states: the plan of its own states, as far as there is one.
    """

    kernels: CacheKernels
    rope: RopeSpec | None = None
    """The rotary table it turns by."""

    def __init__(
        self, spec: Any, hidden_size: int, norm_eps: float, kernels: CacheKernels, states: Sequence[StateSpec] = ()
    ) -> None:
        super().__init__()
        self.kernels = kernels

    def forward(self, normed: torch.Tensor, call: Call, states: list[torch.Tensor]) -> torch.Tensor:
        """``[1, Q, D]`` to ``[1, Q, D]``; its `states`, in the order of the plan, are written in place."""
        raise NotImplementedError


class FeedForward(Part):
    """Looks at every token by itself."""

    def __init__(self, spec: Any, hidden_size: int) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[1, Q, D]`` to ``[1, Q, D]``."""
        raise NotImplementedError


P = TypeVar("P", bound=Part)


def part_of(spec: Spec, kind: type[P]) -> type[P]:
    """The class of parts that computes `spec`."""
    _import_all()
    found = Part.of[type(spec)]
    assert issubclass(found, kind), f"{found.__name__} is no {kind.__name__}"
    return found


@cache
def _import_all() -> None:
    for module in iter_modules(exporter.model.__path__):
        import_module(f"{exporter.model.__name__}.{module.name}")
