"""The registry: which family reads which model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from exporter.errors import UnsupportedModelError
from exporter.families.base import Family, ReadTensor, Target
from exporter.families.gemma3 import Gemma3
from exporter.families.llama import Llama
from exporter.families.reading import contradiction, refuse_flags
from exporter.spec import ModelSpec

__all__ = ["FAMILIES", "Family", "Target", "from_gguf", "from_hf"]

FAMILIES: tuple[Family, ...] = (Gemma3(), Llama())


def _find(kind: str, name: Any, table: Mapping[str, Family]) -> Family:
    if not isinstance(name, str) or name not in table:
        raise UnsupportedModelError(
            "families",
            got=f"{kind} {name!r}",
            expected=f"one of {', '.join(sorted(table))}",
            repair="Export a model of a known family, or add one in exporter/families.",
        )
    return table[name]


def from_hf(config: Mapping[str, Any]) -> tuple[Family, ModelSpec]:
    """The family of a ``config.json`` and the spec it means.

    Raises:
        UnsupportedModelError: unknown `model_type`, or arithmetic the spec cannot say.
        CheckpointError: the config contradicts itself.
    """
    family = _find("model_type", config.get("model_type"), {name: f for f in FAMILIES for name in f.model_types})
    refuse_flags(config, ("quantization_config",))
    try:
        return family, family.spec_from_hf(config)
    except ValidationError as error:
        raise contradiction(str(error.errors()[0]["input"]), error.errors()[0]["msg"]) from error


def from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], read: ReadTensor
) -> tuple[Family, ModelSpec]:
    """The family of a GGUF header and the spec it means. Raises as `from_hf` does.

    Args:
        shapes: tensor name -> shape in torch's order.
        read: reads one tensor as float32.
    """
    table = {name: f for f in FAMILIES for name in f.architectures}
    family = _find("general.architecture", metadata.get("general.architecture"), table)
    try:
        return family, family.spec_from_gguf(metadata, shapes, read)
    except ValidationError as error:
        raise contradiction(str(error.errors()[0]["input"]), error.errors()[0]["msg"]) from error
