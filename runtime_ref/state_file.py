"""The file of a saved conversation: safetensors with a version, a fingerprint of the model and checksums.

Version 2 has ``checksums``, the SHA-256 of every tensor's bytes by name, and ``seal``, that of all the other metadata:
a byte that changed on a disk or on the way is found, wherever it is. (Who can write the file can write both anew.)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from exporter.errors import UserError
from exporter.outputs import written
from exporter.spec import Manifest

STATE_VERSION = "2"
_TOKENS = "tokens"
_DTYPES = {"F32": "float32", "F16": "float16", "I8": "int8", "I64": "int64"}
"""In the words of manifests."""


class StateFileError(UserError):
    """A saved state that is missing, damaged, of another model, or cannot be written."""


def fingerprint(manifest: Manifest) -> str:
    """SHA-256 over all that a state depends on: model, states, weights, quantisation."""
    identity = manifest.model_dump(mode="json", include={"model"})
    identity["program"] = manifest.program.model_dump(mode="json", include={"format", "options", "states"})
    identity["weights"] = manifest.source.files
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def write_state(
    path: Path, manifest: Manifest, tensors: dict[str, Tensor], tokens: Sequence[int], high_water: int
) -> None:
    """Write beside `path` and rename.

    Raises:
        StateFileError: the file cannot be written.
    """
    kept = {**tensors, _TOKENS: torch.tensor(tokens, dtype=torch.int64)}
    metadata = {
        "version": STATE_VERSION,
        "fingerprint": fingerprint(manifest),
        "high_water": str(high_water),
        "checksums": json.dumps({name: checksum(tensor) for name, tensor in kept.items()}),
    }
    metadata["seal"] = seal(metadata)
    try:
        with written(path) as partial:
            save_file(kept, partial, metadata)
    except (OSError, SafetensorError) as error:
        raise _error(path, f"a file that cannot be written ({error})", "Free some space or choose another.") from error


def read_state(path: Path, manifest: Manifest) -> tuple[dict[str, Tensor], list[int], int]:
    """Read a file that `write_state` wrote for this very model. Nothing of it is read into memory before its header
    says that it is one: every tensor that the kinds of the states keep, in their shape and dtype, and no other.

    Returns:
        The tensors by state name (of each state the rows that its kind keeps), the tokens, the high-water mark.

    Raises:
        StateFileError: no such file, a damaged one, another version or another model.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("version") != STATE_VERSION:
                raise _error(path, f"state version {metadata.get('version')}", "Run the prompt again and save anew.")
            if metadata.get("fingerprint") != fingerprint(manifest):
                raise _error(path, "the state of another model", "Load it into the bundle that wrote it.")
            if metadata.get("seal") != seal(metadata) or not _as_written(path):
                raise _damaged(path, "its header")
            # Whoever has the bundle can compute its fingerprint.
            held = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
            found = {name: (tuple(one.get_shape()), _DTYPES.get(one.get_dtype())) for name, one in held.items()}
            if wrong := _wrong_tensor(found, manifest):
                raise _error(path, wrong, "Name a file that `save` wrote.")
            tensors = {name: file.get_tensor(name) for name in found}
            checksums = json.loads(metadata.get("checksums", "{}"))
            if not isinstance(checksums, dict):
                raise _damaged(path, "its checksums")
            if damaged := [name for name, tensor in tensors.items() if checksums.get(name) != checksum(tensor)]:
                raise _damaged(path, ", ".join(damaged))
    except (OSError, SafetensorError, ValueError) as error:  # ValueError: of JSON and of names that are no UTF-8
        raise _error(path, f"a file that cannot be read ({error})", "Name a file that `save` wrote.") from error
    tokens: list[int] = tensors.pop(_TOKENS).tolist()
    high_water = metadata.get("high_water", "")
    if not all(0 <= token < manifest.model.vocab_size for token in tokens):
        raise _error(path, "tokens outside the vocabulary", "Name a file that `save` wrote.")
    marks = range(len(tokens), manifest.max_context_length + 1)
    if not high_water.isdecimal() or int(high_water) not in marks:
        raise _error(path, f"high-water mark {high_water!r}", "Name a file that `save` wrote.")
    return tensors, tokens, int(high_water)


def _wrong_tensor(found: Mapping[str, tuple[tuple[int, ...], str | None]], manifest: Manifest) -> str | None:
    """The first that is not what was saved, of shapes and dtypes by name."""
    shape, dtype = found.get(_TOKENS, ((), None))
    if dtype != "int64" or len(shape) != 1 or shape[0] > manifest.max_context_length:
        return f"{_TOKENS} {list(shape)} {dtype}"
    wanted = {spec.name: spec.cache_kind.saved_as(spec, shape[0]) for spec in manifest.states}
    for name, one in wanted.items():
        if found.get(name) != one:
            got = f"{name} {list(found[name][0])} {found[name][1]}" if name in found else f"no {name}"
            return f"{got} where {list(one[0])} {one[1]} was saved"
    others = found.keys() - wanted.keys() - {_TOKENS}
    return f"also {', '.join(sorted(others))}" if others else None


def checksum(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes, in hexadecimal."""
    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()


def seal(metadata: Mapping[str, str]) -> str:
    """SHA-256 of all metadata but itself."""
    others = {name: value for name, value in metadata.items() if name != "seal"}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


def _as_written(path: Path) -> bool:
    """Whether the header is spelt as safetensors writes one: nothing in it twice, no blanks but those that fill it up.
    The seal does not see such changes."""
    with path.open("rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
    text = json.dumps(json.loads(header), separators=(",", ":"), ensure_ascii=False).encode()
    return header == text + b" " * (-len(text) % 8)


def _damaged(path: Path, what: str) -> StateFileError:
    return _error(path, f"other bytes than were saved, in {what}", "Copy the file again, or run the prompt anew.")


def _error(path: Path, got: str, repair: str) -> StateFileError:
    return StateFileError(
        f"state file {path.name}", got=got, expected=f"version {STATE_VERSION} for this bundle", repair=repair
    )
