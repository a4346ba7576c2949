"""The registry: which family reads which model. Every module here that has a `FAMILY` is one."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from exporter.errors import UnsupportedModelError
from exporter.families.base import Described, Family, ReadTensor, Shapes
from exporter.families.quantised import method_of_config, refuse_quantised
from exporter.families.reading import contradiction

__all__ = ["ARCHITECTURES", "MODEL_TYPES", "Described", "Family", "discover", "from_gguf", "from_hf"]


def discover(package: ModuleType) -> tuple[dict[str, Family], dict[str, Family]]:
    """The families among the modules of `package`, by `model_type` and by GGUF architecture, both in alphabetical
    order; no two may claim one name."""
    model_types: dict[str, Family] = {}
    architectures: dict[str, Family] = {}
    for name in sorted(module.name for module in pkgutil.iter_modules(package.__path__)):
        family = getattr(importlib.import_module(f"{package.__name__}.{name}"), "FAMILY", None)
        if family is None:  # what families share
            continue
        for claimed, names in ((model_types, family.model_types), (architectures, family.architectures)):
            for claim in names:
                assert claim not in claimed, f"{claim} is claimed by {name} and by another family"
                claimed[claim] = family
    return dict(sorted(model_types.items())), dict(sorted(architectures.items()))


MODEL_TYPES, ARCHITECTURES = discover(sys.modules[__name__])


def _find(kind: str, name: Any, table: Mapping[str, Family]) -> Family:
    if not isinstance(name, str) or name not in table:
        raise UnsupportedModelError(
            "families",
            got=f"{kind} {name!r}",
            expected=f"one of {', '.join(table)}",
            repair="Export a model of a known family, or add one in exporter/families.",
        )
    return table[name]


def from_hf(config: Mapping[str, Any]) -> Described:
    """What a ``config.json`` means: the tensors its checkpoint stores, and the spec.

    Raises:
        UnsupportedModelError: unknown `model_type`, or arithmetic the spec cannot say.
        CheckpointError: the config contradicts itself.
    """
    family = _find("model_type", config.get("model_type"), MODEL_TYPES)
    method = method_of_config(config)
    if method is not None and method not in family.quant_methods:
        raise refuse_quantised("model config", method)
    try:
        return family.from_hf(config)
    except ValidationError as error:
        raise contradiction(str(error.errors()[0]["input"]), error.errors()[0]["msg"]) from error


def from_gguf(metadata: Mapping[str, Any], shapes: Shapes, read: ReadTensor) -> Described:
    """What a GGUF header means. Raises as `from_hf` does.

    Args:
        shapes: tensor name -> shape in torch's order.
        read: reads one tensor as float32.
    """
    family = _find("general.architecture", metadata.get("general.architecture"), ARCHITECTURES)
    assert family.from_gguf is not None
    try:
        return family.from_gguf(metadata, shapes, read)
    except ValidationError as error:
        raise contradiction(str(error.errors()[0]["input"]), error.errors()[0]["msg"]) from error
