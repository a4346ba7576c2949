"""A GGUF file: metadata, and tensors that are dequantised to float32 one at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from exporter.checkpoint.base import Checkpoint, StoredTensor
from exporter.checkpoint.gguf_header import GGUFTensor, read_header
from exporter.errors import CheckpointError
from exporter.families import from_gguf


class GGUFCheckpoint(Checkpoint):
    """`metadata` is the file's own, key -> value; `license` its own when the export's config is silent."""

    kind = "gguf"

    def __init__(self, path: Path, license: str | None) -> None:
        self.path = path
        header = read_header(path)
        self.metadata, self._tensors = header.metadata, header.tensors
        self.name = str(self.metadata.get("general.name", path.stem))
        self.license = license if license is not None else self.metadata.get("general.license")
        shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self.family, self.spec = from_gguf(self.metadata, shapes, lambda name: self._dequantize(self._tensors[name]))

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.path,)

    def _stored(self) -> list[StoredTensor]:
        return [
            StoredTensor(name, self.path.name, tensor.shape, self.family.target_from_gguf(name, self.spec))
            for name, tensor in self._tensors.items()
            if not self.family.is_ignored_gguf(name)
        ]

    def _read(self, tensor: StoredTensor) -> torch.Tensor:
        return self._dequantize(self._tensors[tensor.key])

    def _dequantize(self, tensor: GGUFTensor) -> torch.Tensor:
        raw = np.fromfile(self.path, np.uint8, tensor.num_bytes, offset=tensor.offset)
        if tensor.type == GGMLQuantizationType.F32:
            return torch.from_numpy(raw.view(np.float32).reshape(tensor.shape))
        if tensor.type == GGMLQuantizationType.F16:
            return torch.from_numpy(raw.view(np.float16).astype(np.float32).reshape(tensor.shape))
        try:
            values = dequantize(raw.reshape(*tensor.shape[:-1], -1), tensor.type)
        except NotImplementedError as error:
            raise CheckpointError(
                f"checkpoint {self.path.name}",
                got=f"tensor {tensor.name} of type {tensor.type.name}",
                expected="a type that the gguf package can dequantise",
                repair="Take another quantisation of the model, for example Q8_0 or Q4_K_M.",
            ) from error
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32).reshape(tensor.shape))
