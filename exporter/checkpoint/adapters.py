"""Adapters beside or inside a model's weights: the weights without them are another model."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from exporter.checkpoint.kind import MAX_SAFETENSORS_HEADER, kind_of
from exporter.errors import CheckpointError

_FILE = re.compile(
    r"adapter_config\.json|((adapters?|lora|pytorch_lora_weights)([._-].*)?|.*[._-]lora)\.(safetensors|bin|npz|pt|gguf)",
    re.IGNORECASE,
)
"""Files of PEFT, MLX, torchtune and others. Folders (of a training's checkpoints) do not count."""
_TENSOR = re.compile(
    r"(^|[._])(lora_(a|b|magnitude_vector|embedding_a|embedding_b)|lora_(up|down)|lokr_w\w*|hada_w\w*|ia3_l|oft_[rs]|boft_[rs]"
    r"|vera_lambda_\w|prompt_embeddings)([._]|$)",
    re.IGNORECASE,
)
"""What PEFT and its kind call the tensors of an adapter."""


def refuse_adapters(directory: Path, weights: Collection[str]) -> None:
    """Raise for an adapter among the files of `directory`, by its name or by its tensors.

    Args:
        weights: the model's own weight files, which are looked at when they are read.

    Raises:
        CheckpointError: there is one.
    """
    files = [path for path in sorted(directory.iterdir()) if path.is_file() and path.name not in weights]
    found = [path.name for path in files if _FILE.fullmatch(path.name)]
    found += [path.name for path in files if path.name not in found and adapter_tensor(_tensors_of(path))]
    if found:
        raise adapter_error(f"checkpoint {directory.resolve().name}", ", ".join(found))


def adapter_tensor(names: Iterable[str]) -> str | None:
    """The first that is a tensor of an adapter."""
    return next((name for name in names if _TENSOR.search(name)), None)


def adapter_error(owner: str, what: str) -> CheckpointError:
    return CheckpointError(
        owner,
        got=f"an adapter beside the weights ({what})",
        expected="weights that it is merged into, or none",
        repair="Merge it (peft: `PeftModel.from_pretrained(...).merge_and_unload().save_pretrained(...)`), or move it "
        "out of the directory to export the model without it.",
    )


def _tensors_of(path: Path) -> Iterable[str]:
    """The tensors of a safetensors file that is not the model's; none of a damaged one, which is not our business."""
    if path.suffix != ".safetensors" or kind_of(path) != "safetensors":
        return ()
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(min(length, MAX_SAFETENSORS_HEADER)))
        except ValueError:
            return ()
    return header.keys() if isinstance(header, dict) else ()
