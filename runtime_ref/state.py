"""The state that the caller owns: allocate, grow, rewind, fork, save, restore."""

from __future__ import annotations

import copy
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from exporter.errors import RuntimeLimitError
from exporter.spec import Manifest, StateSpec
from exporter.units import in_unit
from runtime_ref.memory import KindUsage, planned_rows, usage
from runtime_ref.state_file import read_state, write_state

DTYPES = {"float32": torch.float32, "float16": torch.float16, "int8": torch.int8}


def unwritten(spec: StateSpec, rows: int | None = None) -> Tensor:
    """A state of `rows` rows, by default its first ones, of zeros that take memory page by page when they are first
    written: an allocator would write the zeros, and keep what is freed."""
    shape, dtype = spec.shape(rows), DTYPES[spec.dtype]
    count = math.prod(shape)
    pages = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype, count=count).view(shape)  # which keeps the pages


@dataclass(frozen=True)
class Growth:
    """The growing states went from `from_rows` to `to_rows` rows to hold `seq_len` tokens."""

    seq_len: int
    from_rows: int
    to_rows: int


class State:
    """Every tensor that the programs write, and the tokens they were written for.

    `tensors` stand in the order of ``manifest.states``, contiguous. States that grow start small and do so by the
    bundle's policy; the others keep their rows for ever.

    **Rewinding.** Dropping tokens moves no data: the next call simply starts at an earlier position, and the rows of
    the dropped positions go stale where they lie. How far back that is exact each state's kind says (`exporter.kinds`,
    with the reason why no stale row is seen then), from the tokens seen and the high-water mark, the most this state
    has ever held. What a kind has lost comes back from a fork or a file alone; the start is always within reach.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._first_growing = next((n for n, spec in enumerate(manifest.states) if spec.grows), None)
        self.reset()

    def reset(self) -> None:
        """Forget everything: first sizes, zeros."""
        self.tensors: list[Tensor] = [unwritten(spec) for spec in self.manifest.states]
        self.tokens: list[int] = []
        self.high_water = 0
        self.growths: list[Growth] = []

    @property
    def length(self) -> int:
        """Tokens seen."""
        return len(self.tokens)

    def ensure_rows(self, seq_len: int) -> None:
        """Grow the states that grow to hold `seq_len` tokens; their rows are copied as they are."""
        growing = self._first_growing
        if growing is None or seq_len <= self.tensors[growing].shape[1]:  # they grow together
            return
        before: int | None = None
        for index, spec in enumerate(self.manifest.states):
            old = self.tensors[index]
            rows = max(old.shape[1], planned_rows(self.manifest, spec, seq_len))
            if rows == old.shape[1]:
                continue
            self.tensors[index] = self._copied(spec, old, rows)
            before, after = old.shape[1], rows
        if before is not None:
            self.growths.append(Growth(seq_len=seq_len, from_rows=before, to_rows=after))

    def advance(self, ids: Sequence[int]) -> None:
        """Note that a program has written `ids`."""
        self.tokens.extend(ids)
        self.high_water = max(self.high_water, self.length)

    @property
    def max_rewind(self) -> int:
        """The most tokens that can be dropped without starting over; going back to the start is always possible."""
        return self.length - max((self._earliest(spec) for spec in self.manifest.states), default=0)

    def rewind(self, count: int) -> None:
        """Drop the last `count` tokens. Dropping all of them is `reset`.

        Raises:
            RuntimeLimitError: a row that the next token attends to is gone. The state is as it was.
        """
        if not 0 <= count <= self.length:
            raise RuntimeLimitError(
                "rewind",
                got=f"{count} tokens",
                expected=f"0 to {self.length}, the tokens seen",
                repair="Rewind no further than the start.",
            )
        if count == 0:
            return
        if count == self.length:
            self.reset()
            return
        if count > self.max_rewind:
            # Of those that hold it back alike, one that never goes back is the one to blame.
            held_by = max(self.manifest.states, key=lambda spec: (self._earliest(spec), not spec.cache_kind.rewinds))
            reason, repair = held_by.cache_kind.lost(held_by, self.high_water)
            raise RuntimeLimitError(
                "rewind",
                got=f"{count} tokens",
                expected=f"at most {self.max_rewind}, or all {self.length}, because {reason}",
                repair=repair,
            )
        del self.tokens[-count:]

    def _copied(self, spec: StateSpec, tensor: Tensor, rows: int) -> Tensor:
        """What `tensor` holds, in a state of its own of `rows` rows."""
        copied, kept = unwritten(spec, rows), spec.cache_kind.kept_rows(spec, self.length)
        copied[:, :kept] = tensor[:, :kept]
        return copied

    def _earliest(self, spec: StateSpec) -> int:
        """The earliest length > 0 this state can go back to; 0 when every length will do."""
        return spec.cache_kind.earliest(spec, self.length, self.high_water)

    def fork(self) -> State:
        """An independent copy."""
        other = copy.copy(self)
        other.tensors = [
            self._copied(spec, tensor, tensor.shape[1])
            for spec, tensor in zip(self.manifest.states, self.tensors, strict=True)
        ]
        other.tokens, other.growths = list(self.tokens), list(self.growths)
        return other

    def save(self, path: Path | str) -> None:
        """Write the state and its tokens to a safetensors file, of each state the rows it takes to go on.

        Raises:
            StateFileError: the file cannot be written; an older file at `path` is then still there.
        """
        tensors = {
            spec.name: tensor[:, : spec.cache_kind.kept_rows(spec, self.length)]
            for spec, tensor in zip(self.manifest.states, self.tensors, strict=True)
        }
        write_state(Path(path), self.manifest, tensors, self.tokens, self.high_water)

    def load(self, path: Path | str) -> None:
        """Take over the state saved at `path`.

        Raises:
            StateFileError: no such file, a damaged one, or one of another model. The state is as it was.
        """
        tensors, tokens, high_water = read_state(Path(path), self.manifest)
        self.reset()
        self.ensure_rows(len(tokens))
        for spec, tensor in zip(self.manifest.states, self.tensors, strict=True):
            saved = tensors[spec.name]
            tensor[:, : saved.shape[1]] = saved
        self.tokens, self.high_water = tokens, high_water

    def memory(self) -> tuple[KindUsage, ...]:
        """Bytes allocated and used, by kind of layer."""
        rows = [tensor.shape[1] for tensor in self.tensors]
        states, reached = self.manifest.states, (self.length, self.high_water)
        return usage(states, rows, [spec.cache_kind.used_rows(spec, *reached) for spec in states])

    def report(self) -> str:
        """One line for a log."""
        kinds = self.memory()
        parts = [f"[kv] {self.length} tokens"]
        parts += [f"{k.kind} {k.layers} x {k.rows} rows {in_unit(k.allocated_bytes, 'MiB')}" for k in kinds]
        allocated, used = sum(k.allocated_bytes for k in kinds), sum(k.used_bytes for k in kinds)
        parts.append(f"total {in_unit(allocated, 'MiB')}, {in_unit(used, 'MiB')} used")
        parts.append(f"grown {len(self.growths)} times")
        return " | ".join(parts)
