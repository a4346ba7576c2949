"""What both kinds of checkpoint share: parameters read from stored tensors, one at a time, and stored tensors made of
parameters."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import torch

from exporter.checkpoint.plan import Source, StoredTensor, plan
from exporter.checkpoint.source import sha256_file
from exporter.errors import CheckpointError
from exporter.families.tensors import TensorTable
from exporter.spec import ModelSpec, SourceSpec

HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"

Progress = Callable[[int, int], None]


class Checkpoint(ABC):
    """An opened checkpoint: its header was read and understood, its tensors were not.

    Attributes:
        kind: ``safetensors`` or ``gguf``.
        path: the directory or file.
        name: what it is called in messages and in the manifest.
        spec: the model it holds.
        table: what its tensors bring to the model's parameters.
    """

    kind: Literal["safetensors", "gguf"]
    path: Path
    name: str
    spec: ModelSpec
    table: TensorTable
    license: str | None

    @property
    @abstractmethod
    def files(self) -> tuple[Path, ...]:
        """The files the model is read from."""

    @abstractmethod
    def _stored(self) -> list[StoredTensor]:
        """Every tensor that is not knowingly ignored."""

    @abstractmethod
    def _read(self, tensor: StoredTensor, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop` of the tensor as stored (all of one without axes), dequantised to float32; bytes as
        they are."""

    @cached_property
    def source(self) -> SourceSpec:
        """The manifest's record; hashes every file the first time it is asked for."""
        hashes = {path.name: sha256_file(path) for path in self.files}
        return SourceSpec(kind=self.kind, name=self.name, license=self.license, files=hashes)

    def raw_tensors(self) -> dict[str, Callable[[], torch.Tensor]]:
        """What reads each tensor that is not knowingly ignored, by its name in the files: float32, as it is stored,
        before any transform. For readers of another origin."""
        return {tensor.key: partial(self._read_whole, tensor) for tensor in self._stored()}

    def _read_whole(self, tensor: StoredTensor) -> torch.Tensor:
        return self._read(tensor, 0, tensor.shape[0] if tensor.shape else 1)

    def reader(self, expected: Mapping[str, tuple[int, ...]]) -> Callable[[str], torch.Tensor]:
        """What reads a parameter from the file each time it is called, by its canonical name, as a contiguous float32
        tensor with a memory of its own: the float model need not be in memory at once.

        Args:
            expected: the decoder's parameters, canonical name -> shape (docs/parameters.md).

        Raises:
            CheckpointError: stored and expected tensors do not match. The reader itself raises it for a parameter with
                NaN or infinity, and when the embedding of a tied model that carries a head is unlike that head.
        """
        stored, heads = self._stored_without_heads_of(expected)
        found = plan(self.name, stored, self.table, expected)
        head = plan(self.name, heads, self.table, {HEAD: expected[EMBEDDING]})[HEAD] if heads else ()

        def read(name: str) -> torch.Tensor:
            tensor = self._parameter(name, found[name], expected[name])
            assert tensor.dtype == torch.float32 and tuple(tensor.shape) == tuple(expected[name])
            if name == EMBEDDING and head and not torch.equal(self._parameter(HEAD, head, tensor.shape), tensor):
                raise CheckpointError(
                    f"checkpoint {self.name}",
                    got=f"tied embeddings and a tensor {head[0].key} that differs from the embedding",
                    expected="no head of its own, or one equal to the embedding",
                    repair='Say "tie_word_embeddings": false in config.json if the head is meant.',
                )
            if tensor.numel() and not all(math.isfinite(extreme) for extreme in torch.aminmax(tensor)):
                stored_as = f" ({', '.join(source.key for source in found[name][:3])})" if found[name] else ""
                raise CheckpointError(
                    f"checkpoint {self.name}",
                    got=f"NaN or infinity in {name}{stored_as}",
                    expected="weights that are numbers",
                    repair="Fetch the weights again; if they are as their author saved them, the training diverged.",
                )
            alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
            return tensor if alone else tensor.clone(memory_format=torch.contiguous_format)

        return read

    def _stored_without_heads_of(self, expected: Iterable[str]) -> tuple[list[StoredTensor], list[StoredTensor]]:
        """The stored tensors, and apart from them the heads that a tied model carries all the same."""
        stored = self._stored()
        heads = [] if HEAD in expected else [tensor for tensor in stored if self.table.brings(tensor.key, HEAD)]
        return [tensor for tensor in stored if tensor not in heads], heads

    def _parameter(self, name: str, sources: Sequence[Source], shape: Sequence[int]) -> torch.Tensor:
        """A parameter out of its pieces."""
        if not sources:
            constant = self.table.constant(name)
            assert constant is not None
            return torch.full(tuple(shape), constant)
        if sources[0].piece.part is None:
            return self._part(sources[0])
        parameter, row = torch.empty(tuple(shape)), 0
        for source in sources:
            rows = source.rows(len(shape))
            parameter[row : row + rows] = self._part(source)
            row += rows
        return parameter

    def _part(self, source: Source) -> torch.Tensor:
        """A piece; only the rows it needs are read."""
        window = source.piece.window
        if window is None:
            return source.piece.take(*map(self._read_whole, source.tensors))
        rows = (self._read(tensor, window.start, window.stop) for tensor in source.tensors)
        return source.piece.within_window().take(*rows)

    def stored(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The way back: the float32 tensors that this checkpoint would store if its parameters were `parameters`.

        A head that a tied model carries all the same is not among them, and rows that no parameter has are zero.
        Parameters that are read from one stored tensor as a whole must be equal.

        Raises:
            CheckpointError: as `reader`.
        """
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        result: dict[str, torch.Tensor] = {}
        for name, sources in plan(self.name, self._stored_without_heads_of(shapes)[0], self.table, shapes).items():
            row = 0
            for source in sources:
                part = parameters[name]
                if source.piece.part is not None:
                    rows = source.rows(part.ndim)
                    part, row = part[row : row + rows].reshape(source.shape), row + rows
                whole = result.get(source.key)
                whole = torch.zeros(source.tensors[0].shape) if whole is None else whole
                result[source.key] = source.piece.put(whole, part)
        return result

    def load_state_dict(
        self, expected: Mapping[str, tuple[int, ...]], progress: Progress | None = None
    ) -> dict[str, torch.Tensor]:
        """The whole model, in the order of `expected`; `progress` is called with (tensors done, tensors in all) after
        each. Raises as `reader`, before anything is read but for a tied model's head."""
        read = self.reader(expected)
        result: dict[str, torch.Tensor] = {}
        for done, name in enumerate(expected, start=1):
            result[name] = read(name)
            if progress is not None:
                progress(done, len(expected))
        return result
