"""LEAF: the kinds of state a layer may keep, one module a kind, and the mixers they belong to.

A kind's module says all of it: shapes, growth, bytes, what can be rewound, the order in which a program must access it,
how it is saved. Every module of this package is imported here, so a kind is added by adding its module; a mixer of its
own may stand in the same module, and what computes that is registered in `exporter.model`.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from exporter.kinds.base import (
    CacheKind,
    Layout,
    MixerSpec,
    Rows,
    StateForm,
    StateSpec,
    kind_labelled,
    kind_of,
    one_of,
    registered,
    state_name,
)
from exporter.kinds.policy import CacheDType, CachePolicy, CacheSettings, dtypes_in_words

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

KINDS = registered()
"""Every kind by its name, in their order."""
MIXERS: tuple[type[MixerSpec], ...] = tuple(MixerSpec.__subclasses__())
"""What a layer may mix its tokens with."""

__all__ = [
    "KINDS",
    "MIXERS",
    "CacheDType",
    "CacheKind",
    "CachePolicy",
    "CacheSettings",
    "Layout",
    "MixerSpec",
    "Rows",
    "StateForm",
    "StateSpec",
    "dtypes_in_words",
    "kind_labelled",
    "kind_of",
    "one_of",
    "registered",
    "state_name",
]
