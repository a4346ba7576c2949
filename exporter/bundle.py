"""Write and read a bundle: a directory with `manifest.json`, the program files and the tokenizer.

A bundle is written beside its target and renamed into place (`staging`), so a directory at the target is always a whole
bundle.
Every file's size and SHA-256 stand in the manifest and are checked on reading. Imports no torch.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pydantic import ValidationError

from exporter.errors import BundleError
from exporter.spec import MANIFEST_VERSION, FileEntry, Manifest
from exporter.staging import Staging, staged

MANIFEST_NAME = "manifest.json"
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_ROOM = (*_DISK_FULL, errno.EFBIG)


@dataclass(frozen=True)
class Bundle:
    """A bundle on disk: its directory and what its manifest says."""

    path: Path
    manifest: Manifest


class BundleWriter:
    """What `write_bundle` yields: put files under `path`, then call `finish` once."""

    def __init__(self, staging: Staging) -> None:
        self.path = staging.path
        self._staging = staging

    def finish(self, manifest: Manifest) -> Bundle:
        """Record every staged file in the manifest, write it, and rename the staged directory to the target.

        Args:
            manifest: complete but for `files`, which is computed here.
        """
        assert self.path.exists(), "finish() is called once"
        names = _files_under(self.path)
        manifest = manifest.model_copy(update={"files": {name: _entry(self.path / name) for name in names}})
        missing = [program.file for program in manifest.programs if not _listed(program.file, manifest.files)]
        assert not missing, f"the manifest names programs that were not staged: {missing}"
        text = manifest.model_dump_json(indent=2)
        # JSON has no NaN or infinity: a manifest that does not read back unchanged must not be published.
        assert Manifest.model_validate_json(text) == manifest, "the manifest does not survive JSON"
        (self.path / MANIFEST_NAME).write_text(text + "\n", encoding="utf-8")
        _same_modes(self.path)
        self._staging.publish()
        return Bundle(self._staging.target, manifest)


@contextmanager
def write_bundle(directory: Path | str) -> Iterator[BundleWriter]:
    """Stage a bundle beside `directory`; nothing appears at `directory` unless `finish` is reached.

    A bundle that stands at `directory` is replaced whole; anything else that stands there is refused before any work.
    What earlier calls for `directory` left that were killed is removed.

    Raises:
        BundleError: the target is no bundle, its parent or a staged file cannot be written, the disk is full, or a file
            grows too large.
    """
    target = Path(directory).resolve()
    _refuse_foreign_target(target)
    with ExitStack() as stack:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            staging = stack.enter_context(staged(target))
        except OSError as error:
            raise _write_error(target, error) from error
        try:
            yield BundleWriter(staging)
            assert not staging.path.exists(), "write_bundle() was left without finish()"
        except OSError as error:
            if error.errno not in _NO_ROOM and not _is_under(staging.directory, error.filename):
                raise
            raise _write_error(target, error) from error


def read_bundle(path: Path | str, *, verify_files: bool = True) -> Bundle:
    """Read the manifest of the bundle at `path` and, unless told otherwise, check every file against it.

    Raises:
        BundleError: no manifest, a manifest of another version or with unknown keys, a file that is missing,
            truncated or altered.
    """
    root = Path(path)
    manifest = _read_manifest(root)
    for name, expected in manifest.files.items() if verify_files else ():
        file = root / name
        if not os.path.isfile(file):
            raise BundleError(
                f"bundle {root.name}",
                got=f"no file {name}",
                expected=f"{expected.bytes} bytes with sha256 {expected.sha256}",
                repair="Copy the bundle again, or export it again.",
            )
        got = _entry(file)
        if got != expected:
            raise BundleError(
                f"bundle {root.name}, file {name}",
                got=f"{got.bytes} bytes with sha256 {got.sha256}",
                expected=f"{expected.bytes} bytes with sha256 {expected.sha256}",
                repair="The file was truncated or altered: copy the bundle again, or export it again.",
            )
    return Bundle(root, manifest)


def _read_manifest(root: Path) -> Manifest:
    owner, repair = f"bundle {root.name}", "Export the model again with this version of the exporter."
    try:
        content = json.loads((root / MANIFEST_NAME).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BundleError(
            owner,
            got=f"no {MANIFEST_NAME}" if root.is_dir() else "no such directory",
            expected=f"a bundle directory with {MANIFEST_NAME}",
            repair="Point at the directory that `export` wrote.",
        ) from error
    except OSError as error:  # a name that is too long, a directory that is somebody else's
        raise BundleError(
            f"bundle {root.name[:60]}",
            got=f"{error.strerror}",
            expected=f"a bundle directory with {MANIFEST_NAME}, which can be read",
            repair="Point at the directory that `export` wrote.",
        ) from error
    except ValueError as error:  # broken JSON or broken UTF-8
        raise BundleError(
            owner, got=f"{MANIFEST_NAME} that is no JSON ({error})", expected="a manifest", repair=repair
        ) from error
    version = content.get("version") if isinstance(content, dict) else None
    if version != MANIFEST_VERSION:
        raise BundleError(
            owner, got=f"manifest version {version!r}", expected=f"version {MANIFEST_VERSION}", repair=repair
        )
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BundleError(
            owner, got=f"manifest key {where}: {first['msg']}", expected="a manifest of this version", repair=repair
        ) from error
    stray = [name for name in manifest.files if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts]
    stray += [program.file for program in manifest.programs if not _listed(program.file, manifest.files)]
    if stray:
        raise BundleError(
            owner, got=f"file {stray[0]!r}", expected="files inside the bundle, each with its checksum", repair=repair
        )
    return manifest


def _listed(program: str, files: Collection[str]) -> bool:
    """Whether a program, a file or a directory of the bundle, is among `files`."""
    return any(name == program or name.startswith(f"{program}/") for name in files)


def _files_under(root: Path) -> list[str]:
    return sorted(file.relative_to(root).as_posix() for file in root.rglob("*") if not file.is_dir())


def _same_modes(root: Path) -> None:
    """Every file and directory gets the mode of those made here, which the umask says: libraries that go through
    temporary files leave some that only their owner can read."""
    for path in root.rglob("*"):
        made_here = root if path.is_dir() else root / MANIFEST_NAME
        path.chmod(stat.S_IMODE(made_here.stat().st_mode))


def _entry(file: Path) -> FileEntry:
    with file.open("rb") as stream:
        return FileEntry(bytes=file.stat().st_size, sha256=hashlib.file_digest(stream, "sha256").hexdigest())


def _refuse_foreign_target(target: Path) -> None:
    """Only a directory that holds a bundle and nothing else may be replaced: replacing deletes what is there."""
    seen, foreign = None, None
    while (now := _identity(target)) != seen:  # another export may move it aside and take its place while it is read
        seen = now
        foreign = None if now is None else _foreign(target)
    if foreign is not None:
        raise BundleError(
            f"output {target.name}",
            got=foreign,
            expected="a new directory, or a bundle to replace",
            repair="Choose another output directory, or move what is there away.",
        )


def _identity(path: Path) -> tuple[int, int] | None:
    """The same for one directory as long as it stands there; None where nothing does."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _foreign(target: Path) -> str | None:
    """What stands at `target`, if it is not a bundle and nothing else."""
    try:
        content = json.loads((target / MANIFEST_NAME).read_text(encoding="utf-8"))
        own = {MANIFEST_NAME, *content["files"]}
        others = [name for name in _files_under(target) if name not in own]
    except (OSError, ValueError, KeyError, TypeError):
        return "something that is no bundle"
    return f"a bundle with files of another origin ({', '.join(others[:3])})" if others else None


def _is_under(directory: Path, name: object) -> bool:
    """Whether an error speaks of a file below `directory`."""
    return isinstance(name, str | os.PathLike) and directory in Path(name).parents


def _write_error(target: Path, error: OSError) -> BundleError:
    full = error.errno in _DISK_FULL
    elsewhere = error.filename is not None and not _is_under(target.parent, error.filename)
    got = "disk full" if full else f"{error.strerror or error}"
    return BundleError(
        f"output {target.name}",
        got=f"{got} ({error.filename})" if elsewhere else got,
        expected="a directory that can be written",
        repair="Free some space and export again." if full else "Choose another output directory.",
    )
