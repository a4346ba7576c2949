"""A GGUF file: metadata, and tensors that are dequantised to float32 one at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from exporter.checkpoint.adapters import adapter_tensor
from exporter.checkpoint.base import Checkpoint
from exporter.checkpoint.gguf_header import GGUFTensor, read_header
from exporter.checkpoint.plan import StoredTensor
from exporter.errors import CheckpointError
from exporter.families import from_gguf

WEIGHTS_AT_A_TIME = 2**22
_OTHERS = {"adapter": "an adapter", "mmproj": "a vision or audio encoder", "clip": "a vision or audio encoder",
           "controlvector": "a control vector", "imatrix": "an importance matrix", "vocab": "a vocabulary"}  # fmt: skip
"""``general.type`` or ``general.architecture`` -> what such a file holds, that no model is."""


class GGUFCheckpoint(Checkpoint):
    """`metadata` is the file's own, key -> value; `license` its own when the export's config is silent."""

    kind = "gguf"

    def __init__(self, path: Path, license: str | None) -> None:
        self.path = path
        header = read_header(path)
        self.metadata, self._tensors = header.metadata, header.tensors
        if (kind := _other_than_a_model(self.metadata, self._tensors)) is not None:
            raise CheckpointError(
                f"checkpoint {path.name}",
                got=f"a GGUF file of {kind}, which is no model by itself",
                expected="the model, with everything merged into it",
                repair="Name the model's file; merge an adapter first (llama.cpp: llama-export-lora).",
            )
        self.name = str(self.metadata.get("general.name", path.stem))
        self.license = license if license is not None else self.metadata.get("general.license")
        shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self.table, self.spec = from_gguf(self.metadata, shapes, lambda name: self._dequantize(self._tensors[name]))

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.path,)

    def _stored(self) -> list[StoredTensor]:
        return [
            StoredTensor(name, self.path.name, tensor.shape)
            for name, tensor in self._tensors.items()
            if not self.table.is_ignored(name)
        ]

    def _read(self, tensor: StoredTensor, start: int, stop: int) -> torch.Tensor:
        stored = self._tensors[tensor.key]
        if len(stored.shape) == 1:  # its elements may share a block
            return self._dequantize(stored)[start:stop]
        row = stored.num_bytes // stored.shape[0]
        return self._dequantize(
            replace(
                stored,
                shape=(stop - start, *stored.shape[1:]),
                offset=stored.offset + start * row,
                num_bytes=(stop - start) * row,
            )
        )

    def _dequantize(self, tensor: GGUFTensor) -> torch.Tensor:
        """Rows by rows: the gguf package needs the result's size again for itself."""
        *outer, row_size = tensor.shape
        values = torch.empty(math.prod(outer), row_size)
        row_bytes, step = tensor.num_bytes // len(values), max(1, WEIGHTS_AT_A_TIME // row_size)
        for start in range(0, len(values), step):
            rows = values[start : start + step]
            raw = np.fromfile(
                self.path, np.uint8, row_bytes * len(rows), offset=tensor.offset + start * row_bytes
            ).reshape(len(rows), row_bytes)
            rows.copy_(torch.from_numpy(self._floats(raw, tensor)))
        return values.view(tensor.shape)

    def _floats(self, raw: np.ndarray, tensor: GGUFTensor) -> np.ndarray:
        """Bytes of some rows of `tensor`, uint8 ``[n, bytes a row]``, to float32 ``[n, row size]``."""
        if tensor.type == GGMLQuantizationType.F32:
            return raw.view(np.float32)
        if tensor.type == GGMLQuantizationType.F16:
            return raw.view(np.float16).astype(np.float32)
        try:
            return dequantize(raw, tensor.type)
        except NotImplementedError as error:
            raise CheckpointError(
                f"checkpoint {self.path.name}",
                got=f"tensor {tensor.name} of type {tensor.type.name}",
                expected="a type that the gguf package can dequantise",
                repair="Take another quantisation of the model, for example Q8_0 or Q4_K_M.",
            ) from error


def _other_than_a_model(metadata: Mapping[str, Any], tensors: Iterable[str]) -> str | None:
    """What a file holds that is no model. Older adapters say no type, but have keys of their own."""
    kind = str(metadata.get("general.type", "model"))
    if kind != "model":
        return _OTHERS.get(kind, f"type {kind!r}")
    own = {str(metadata.get("general.architecture")), *(key.partition(".")[0] for key in metadata)}
    if found := own & _OTHERS.keys():
        return _OTHERS[min(found)]
    return None if adapter_tensor(tensors) is None else _OTHERS["adapter"]
