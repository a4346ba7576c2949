"""What both kinds of checkpoint share: the plan that pairs stored tensors with parameters, before any data is read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import torch

from exporter.checkpoint.source import sha256_file
from exporter.errors import CheckpointError
from exporter.families import Target
from exporter.spec import ModelSpec, SourceSpec

_SHOWN = 5
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint: where it is, its shape as torch sees it, and where it goes (None: nowhere known)."""

    key: str
    file: str
    shape: tuple[int, ...]
    target: Target | None


def _several(items: Iterable[str]) -> str:
    items = list(items)
    more = f", and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return "; ".join(items[:_SHOWN]) + more


def plan(name: str, stored: Iterable[StoredTensor], expected: Mapping[str, tuple[int, ...]]) -> dict[str, StoredTensor]:
    """Pair every expected parameter with exactly one stored tensor.

    Args:
        name: the checkpoint, for messages.
        stored: its tensors, the knowingly ignored ones left out.
        expected: canonical name -> shape.

    Raises:
        CheckpointError: tensors are unexpected, stored twice, missing or misshaped; all of a kind in one error.
    """
    found: dict[str, StoredTensor] = {}
    unexpected: list[str] = []
    twice: list[str] = []
    for tensor in stored:
        target = tensor.target.name if tensor.target is not None else None
        if target is None or target not in expected:
            unexpected.append(f"{tensor.key} in {tensor.file}")
        elif target in found:
            twice.append(f"{target} as {found[target].key} and as {tensor.key}")
        else:
            found[target] = tensor
    missing = [f"{key} {list(shape)}" for key, shape in expected.items() if key not in found]
    shapes = [
        f"{tensor.key} in {tensor.file} is {list(tensor.shape)}, not {list(expected[key])}"
        for key, tensor in found.items()
        if tensor.shape != tuple(expected[key])
    ]
    problems = (
        ("missing tensors", missing, "every parameter of the model"),
        ("unexpected tensors", unexpected, "only the model's own"),
        ("tensors stored twice", twice, "each once"),
        ("misshaped tensors", shapes, "the shapes the model's config implies"),
    )
    if wrong := [(f"{len(items)} {kind} ({_several(items)})", want) for kind, items, want in problems if items]:
        raise CheckpointError(
            f"checkpoint {name}",
            got="; ".join(got for got, _ in wrong),
            expected=", ".join(want for _, want in wrong),
            repair="The weights do not belong to this config: fetch both again, from one place.",
        )
    return found


class Checkpoint(ABC):
    """An opened checkpoint: its header was read and understood, its tensors were not.

    Attributes:
        kind: ``safetensors`` or ``gguf``.
        path: the directory or file.
        name: what it is called in messages and in the manifest.
        spec: the model it holds.
    """

    kind: Literal["safetensors", "gguf"]
    path: Path
    name: str
    spec: ModelSpec
    license: str | None

    @property
    @abstractmethod
    def files(self) -> tuple[Path, ...]:
        """The files the model is read from."""

    @abstractmethod
    def _stored(self) -> list[StoredTensor]:
        """Every tensor that is not knowingly ignored."""

    @abstractmethod
    def _read(self, tensor: StoredTensor) -> torch.Tensor:
        """The tensor as stored, dequantised to float32, before its transform."""

    @cached_property
    def source(self) -> SourceSpec:
        """The manifest's record; hashes every file the first time it is asked for."""
        hashes = {path.name: sha256_file(path) for path in self.files}
        return SourceSpec(kind=self.kind, name=self.name, license=self.license, files=hashes)

    def stored(self) -> dict[str, Callable[[], torch.Tensor]]:
        """What reads each tensor that is not knowingly ignored, by its name in the files: float32, as it is stored,
        before any transform. For readers of another origin."""
        return {tensor.key: partial(self._read, tensor) for tensor in self._stored()}

    def reader(self, expected: Mapping[str, tuple[int, ...]]) -> Callable[[str], torch.Tensor]:
        """What reads a parameter from the file each time it is called, by its canonical name, as a contiguous float32
        tensor: the float model need not be in memory at once.

        Args:
            expected: the decoder's parameters, canonical name -> shape (docs/parameters.md).

        Raises:
            CheckpointError: stored and expected tensors do not match. The reader itself raises it only when the
                embedding of a tied model that carries a head is unlike that head.
        """
        stored = self._stored()
        extra_head = None
        if HEAD not in expected:  # a tied model
            heads = [tensor for tensor in stored if tensor.target is not None and tensor.target.name == HEAD]
            stored = [tensor for tensor in stored if tensor not in heads]
            extra_head = heads[0] if heads else None
        found = plan(self.name, stored, expected)

        def read(name: str) -> torch.Tensor:
            tensor = self._read(found[name])
            target = found[name].target
            assert target is not None
            if target.transform is not None:
                tensor = target.transform(tensor)
            assert tensor.dtype == torch.float32 and tuple(tensor.shape) == tuple(expected[name])
            if name == EMBEDDING and extra_head is not None and not self._same(extra_head, tensor):
                raise CheckpointError(
                    f"checkpoint {self.name}",
                    got=f"tied embeddings and a tensor {extra_head.key} that differs from the embedding",
                    expected="no head of its own, or one equal to the embedding",
                    repair='Say "tie_word_embeddings": false in config.json if the head is meant.',
                )
            return tensor.contiguous()

        return read

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

    def _same(self, head: StoredTensor, embedding: torch.Tensor) -> bool:
        return head.shape == tuple(embedding.shape) and torch.equal(self._read(head), embedding)
