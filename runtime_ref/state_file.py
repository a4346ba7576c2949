"""The file of a saved conversation: safetensors with a version and a fingerprint of the model."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from exporter.errors import UserError
from exporter.spec import Manifest

STATE_VERSION = "1"
_TOKENS = "tokens"


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
    metadata = {"version": STATE_VERSION, "fingerprint": fingerprint(manifest), "high_water": str(high_water)}
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        save_file({**tensors, _TOKENS: torch.tensor(tokens, dtype=torch.int64)}, partial, metadata)
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        raise _error(path, f"a file that cannot be written ({error})", "Free some space or choose another.") from error
    finally:
        partial.unlink(missing_ok=True)


def read_state(path: Path, manifest: Manifest) -> tuple[dict[str, Tensor], list[int], int]:
    """Read a file that `write_state` wrote for this very model.

    Returns:
        The tensors by state name (full states cut to the tokens seen), the tokens, the high-water mark.

    Raises:
        StateFileError: no such file, a damaged one, another version or another model.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
    except (OSError, SafetensorError) as error:
        raise _error(path, f"a file that cannot be read ({error})", "Name a file that `save` wrote.") from error
    if metadata.get("version") != STATE_VERSION:
        raise _error(path, f"state version {metadata.get('version')}", "Run the prompt again and save anew.")
    if metadata.get("fingerprint") != fingerprint(manifest):
        raise _error(path, "the state of another model", "Load it into the bundle that wrote it.")
    # The fingerprint matches, so we wrote this file and trust its content.
    tokens: list[int] = tensors.pop(_TOKENS).tolist()
    return tensors, tokens, int(metadata["high_water"])


def _error(path: Path, got: str, repair: str) -> StateFileError:
    return StateFileError(
        f"state file {path.name}", got=got, expected=f"version {STATE_VERSION} for this bundle", repair=repair
    )
