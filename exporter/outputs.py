"""LEAF: a file that a command writes where the user says.

A regular file is written beside its place and renamed, so that a reader never sees half of it and a full disk keeps the
older one. A symlink is followed. A pipe or a character device is written through: renaming over ``/dev/null`` would
make a file of it. Everything else that may stand there is refused.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from exporter.errors import ConfigError


def check_output(owner: str, path: Path) -> None:
    """Before any work: whether `path` can be an output.

    Raises:
        ConfigError: its directory is missing, or what stands there is neither a file, a pipe nor a device.
    """
    try:
        _target(path)
    except OSError as error:
        raise cannot_write(owner, path, error) from error


def cannot_write(owner: str, path: Path, error: OSError) -> ConfigError:
    """The error for an output of the option `owner`."""
    return ConfigError(
        owner,
        got=f"{path} ({error.strerror or error})",
        expected="a file that can be written, in a directory that exists",
        repair="Free some space or name another file.",
    )


@contextlib.contextmanager
def written(path: Path) -> Iterator[Path]:
    """A place to write a file to, which becomes the output `path` when this is left without an error.

    Raises:
        OSError: it cannot be written.
    """
    target, through = _target(path)
    if not through:
        partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
        try:
            yield partial
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        partial = Path(folder) / "output"
        yield partial
        with partial.open("rb") as source, target.open("wb", buffering=0) as sink:
            shutil.copyfileobj(source, sink)


def write_json(owner: str, path: Path, content: object) -> None:
    """Write `content` to `path` as JSON.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        with written(path) as partial:
            partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise cannot_write(owner, path, error) from error


def _target(path: Path) -> tuple[Path, bool]:
    """What `path` stands for behind its symlinks, and whether it is written through.

    Raises:
        OSError: it can be no output.
    """
    target = Path(os.path.realpath(path))
    if not os.path.isdir(target.parent):
        raise FileNotFoundError(errno.ENOENT, "no such directory", str(target.parent))
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return target, False
    if stat.S_ISREG(mode):
        return target, False
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        return target, True
    kind = "a directory" if stat.S_ISDIR(mode) else "a socket" if stat.S_ISSOCK(mode) else "no regular file"
    raise OSError(errno.EINVAL, f"it is {kind}", str(target))
