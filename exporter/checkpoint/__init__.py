"""Checkpoints: safetensors directories and GGUF files, opened without reading their tensors. No pickles."""

from __future__ import annotations

from pathlib import Path

from exporter.checkpoint.base import Checkpoint
from exporter.checkpoint.gguf import GGUFCheckpoint
from exporter.checkpoint.kind import kind_of, refuse_kind
from exporter.checkpoint.safetensors import SafetensorsCheckpoint
from exporter.checkpoint.source import locate, mismatch, sha256_file
from exporter.config import CheckpointConfig
from exporter.errors import CheckpointError

__all__ = ["Checkpoint", "GGUFCheckpoint", "SafetensorsCheckpoint", "open_checkpoint"]


def _verify(path: Path, expected: str) -> None:
    got = sha256_file(path)
    if got != expected:
        raise mismatch(path.name, got, expected)


def open_checkpoint(config: CheckpointConfig) -> Checkpoint:
    """Find, verify and open what a config names.

    Raises:
        CheckpointError: missing, damaged, another `sha256`, or a kind that is refused.
        UnsupportedModelError: a model no family can describe.
    """
    path = locate(config)
    if path.is_dir():
        directory = SafetensorsCheckpoint(path, config.license)
        if config.sha256 is not None:
            if len(directory.weight_files) != 1:
                raise CheckpointError(
                    f"checkpoint {path.name}",
                    got=f"one sha256 for {len(directory.weight_files)} shards",
                    expected="sha256 with a single weight file only",
                    repair="Leave sha256 out; the manifest records one for each shard.",
                )
            _verify(directory.weight_files[0], config.sha256)
        return directory
    if kind_of(path) != "gguf":
        raise refuse_kind(path)
    joined = config.package_files is not None and len(config.package_files) > 1
    if config.sha256 is not None and not joined:  # a joined file was verified when it was found
        _verify(path, config.sha256)
    return GGUFCheckpoint(path, config.license)
