"""A Hugging Face directory: ``config.json`` and ``model.safetensors``, whole or in shards. Pickles are never opened."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from exporter.checkpoint.adapters import adapter_error, adapter_tensor, refuse_adapters
from exporter.checkpoint.base import Checkpoint
from exporter.checkpoint.kind import kind_of, refuse_kind
from exporter.checkpoint.plan import StoredTensor
from exporter.errors import CheckpointError
from exporter.families import from_hf
from exporter.families.quantised import method_of_config, method_of_tensors, refuse_quantised

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHTS_AT_A_TIME = 2**25
_DTYPES, _RAW = ("F32", "F16", "BF16"), ("U8",)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        CheckpointError: the file cannot be read or holds something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {path.name}", got=str(error), expected="readable JSON", repair="Fetch the file again."
        ) from error
    if not isinstance(data, dict):
        raise CheckpointError(
            f"checkpoint {path.name}",
            got=f"a {type(data).__name__}",
            expected="a JSON object",
            repair="Fetch the file again.",
        )
    return data


def _refuse_others(files: Iterable[Path]) -> None:
    """Raise for weights of another kind, whatever they are called; what is no weights at all is not judged here."""
    for file in files:
        if kind_of(file) in ("pickle", "gguf"):
            raise refuse_kind(file)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"checkpoint {path.name}",
            got=f"an unreadable file ({error})",
            expected="a complete safetensors file",
            repair="Download or copy the file again.",
        ) from error


class SafetensorsCheckpoint(Checkpoint):
    """`hf_config` is ``config.json`` as it stands; `license` what the export's config says."""

    kind = "safetensors"

    def __init__(self, path: Path, license: str | None) -> None:
        self.path, self.name, self.license = path, path.resolve().name, license
        config_file = path / "config.json"
        if not config_file.is_file():
            refuse_adapters(path, (WEIGHTS,))
            raise CheckpointError(
                f"checkpoint {self.name}",
                got="a directory without config.json",
                expected=f"a Hugging Face directory (config.json, {WEIGHTS}); a .gguf file is named itself",
                repair="Correct checkpoint.path.",
            )
        self.hf_config = read_json(config_file)
        self._index = self._weight_map()
        refuse_adapters(path, self._index)
        _refuse_others(self.weight_files)
        self.table, self.spec = from_hf(self.hf_config)

    def _weight_map(self) -> dict[str, list[str]]:
        """Weight file -> the tensors the index promises in it; a single file promises nothing."""
        if (self.path / WEIGHTS).is_file():
            return {WEIGHTS: []}
        if not (self.path / INDEX).is_file():
            refuse_adapters(self.path, ())
            if (method := method_of_config(self.hf_config)) is not None:
                raise refuse_quantised(f"checkpoint {self.name}", method)
            files = sorted(path for path in self.path.iterdir() if path.is_file())
            _refuse_others(files)
            others = ", ".join(path.name for path in files if path.suffix == ".safetensors")
            raise CheckpointError(
                f"checkpoint {self.name}",
                got=f"a directory without weights{others and f' of that name, but with {others}'}",
                expected=f"{WEIGHTS}, or {INDEX} and its shards",
                repair="Fetch the weights.",
            )
        index = read_json(self.path / INDEX).get("weight_map")
        shards: dict[str, list[str]] = {}
        for key, file in (index if isinstance(index, dict) else {}).items():
            shards.setdefault(str(file), []).append(key)
        if absent := sorted(f for f in shards if Path(f).name != f or not (self.path / f).is_file()):
            raise CheckpointError(
                f"checkpoint {INDEX}",
                got=f"shards that are not in the directory: {', '.join(absent)}",
                expected="every shard beside the index",
                repair="Fetch the missing shards.",
            )
        if not shards:
            raise CheckpointError(
                f"checkpoint {INDEX}", got="no weight_map", expected="tensor -> shard", repair="Fetch it again."
            )
        return shards

    @property
    def files(self) -> tuple[Path, ...]:
        index = () if WEIGHTS in self._index else (self.path / INDEX,)
        return (self.path / "config.json", *index, *(self.path / file for file in sorted(self._index)))

    @property
    def weight_files(self) -> tuple[Path, ...]:
        return tuple(self.path / file for file in sorted(self._index))

    def _stored(self) -> list[StoredTensor]:
        stored: list[StoredTensor] = []
        absent: list[str] = []
        dtypes: list[str] = []
        foreign: dict[str, str] = {}
        for file, promised in self._index.items():
            with _opened(self.path / file) as weights:
                keys = list(weights.keys())
                absent += [f"{key} in {file}" for key in promised if key not in keys]
                for key in keys:
                    if self.table.is_ignored(key):
                        continue
                    view, raw = weights.get_slice(key), self.table.is_raw(key)
                    misfit = view.get_dtype() not in (_RAW if raw else _DTYPES)
                    if not raw and (misfit or not self.table.knows(key)):
                        foreign[key] = view.get_dtype()
                    if misfit:
                        dtypes.append(f"{key} in {file} is {view.get_dtype()}")
                    stored.append(StoredTensor(key, file, tuple(view.get_shape()), raw))
        if (adapter := adapter_tensor(foreign)) is not None:
            raise adapter_error(f"checkpoint {self.name}", adapter)
        if (method := method_of_tensors(foreign)) is not None:
            raise refuse_quantised(f"checkpoint {self.name}", method)
        for wrong, expected, repair in (
            (absent, "every tensor the index names in the shard it names", "Fetch index and shards again, together."),
            (dtypes, f"weights of type {', '.join(_DTYPES)}", "Save the weights as float32, float16 or bfloat16."),
        ):
            if wrong:
                more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
                raise CheckpointError(
                    f"checkpoint {self.name}",
                    got=f"{len(wrong)} tensors that break this: {'; '.join(wrong[:5])}{more}",
                    expected=expected,
                    repair=repair,
                )
        return stored

    def _read(self, tensor: StoredTensor, start: int, stop: int) -> torch.Tensor:
        """The file's pages count as memory while it is open, so it is opened again for every few rows."""
        if not tensor.shape:
            with _opened(self.path / tensor.file) as weights:
                return weights.get_tensor(tensor.key).float()
        row = tensor.shape[1:]
        read = torch.empty((stop - start, *row), dtype=torch.uint8 if tensor.raw else torch.float32)
        rows = max(1, WEIGHTS_AT_A_TIME // max(1, math.prod(row)))
        for done in range(0, len(read), rows):
            with _opened(self.path / tensor.file) as weights:
                part = weights.get_slice(tensor.key)[start + done : min(start + done + rows, stop)]
                read[done : done + rows] = part
        return read
