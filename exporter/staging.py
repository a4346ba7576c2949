"""LEAF: a directory that is filled beside its target and renamed to it when it is whole.

Beside the target `NAME` stand, while it is filled:

    .NAME.TOKEN.partial/NAME    what will be renamed to `NAME`
    .NAME.TOKEN.partial/lock    locked by its owner for as long as that lives
    .NAME.TOKEN.old             what was at `NAME` before, between two renames

Whoever is killed leaves them there; the next one with the same target removes those whose owner is dead.

The owner is known by a lock, not by a process id: ids are used again, and mean nothing in another container or on
another machine that shares the volume. The kernel drops a lock with its process, however that ends; an NFS server does
when the client's lease runs out. The lock is on a regular file, because NFS locks no directories. On a file system
without locks nothing is ever removed: nobody can tell whose owner lives.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

_LOCK = "lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST)


class Staging:
    """What `staged` yields: put files under `path`, then call `publish` once."""

    def __init__(self, target: Path, token: str) -> None:
        self.target = target
        self.directory = target.parent / f".{target.name}.{token}.partial"
        self.path = self.directory / target.name
        self._old = target.parent / f".{target.name}.{token}.old"
        self._descriptor: int | None = None

    def claim(self) -> bool:
        """Make the directory and lock it; False if a `sweep` came between the two.

        Raises:
            OSError: it cannot be made.
        """
        try:
            self.directory.mkdir()
        except FileExistsError:
            return False
        try:
            self.lock()
        except (BlockingIOError, FileNotFoundError):
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                self.remove()
                raise
        self.path.mkdir()
        return True

    def lock(self) -> None:
        """Take the lock of the directory.

        Raises:
            BlockingIOError: its owner lives.
            FileNotFoundError: it is gone.
            OSError: the file system has no locks, or the directory is another user's.
        """
        file = self.directory / _LOCK
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(descriptor), os.stat(file)):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file))
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def publish(self) -> None:
        """Rename `path` to the target. Of two that publish at once the later one stays.

        Raises:
            OSError: it cannot be renamed; what was at the target goes back there with `remove`.
        """
        while True:
            try:
                os.rename(self.path, self.target)
                return
            except OSError as error:
                if error.errno not in _OCCUPIED:
                    raise
            # A directory cannot be renamed over one that is not empty: what is there steps aside.
            _remove(self._old)
            with contextlib.suppress(FileNotFoundError):  # another one has moved it
                os.rename(self.target, self._old)

    def settle(self) -> None:
        """Remove what stepped aside, or put it back where nothing took its place."""
        if not os.path.lexists(self._old):
            return
        with contextlib.suppress(OSError):
            if not os.path.lexists(self.target):
                os.rename(self._old, self.target)
        if os.path.lexists(self.target):  # if not, it is the only one: the next export tries again
            _remove(self._old)

    def remove(self) -> None:
        """Remove all that is left, and drop the lock: last, so that a directory just made is not taken for a dead one's
        while it goes."""
        self.settle()
        _remove(self.directory)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        with contextlib.suppress(OSError):
            self.directory.rmdir()  # NFS keeps a file that is open, here the lock, and so its directory


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Staging]:
    """A new directory for `target`, gone when this is left. Before it go those whose owners are dead.

    Raises:
        OSError: it cannot be made.
    """
    sweep(target)
    staging = Staging(target, secrets.token_hex(4))
    while not staging.claim():
        staging = Staging(target, secrets.token_hex(4))
    try:
        yield staging
    finally:
        with _undisturbed():
            staging.remove()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Signals that ask the process to end wait until this is left: whoever presses Ctrl-C twice wants no half of a
    bundle either. Python handles signals in its main thread; in another one there is nothing to put off."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []
    asks = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: handler for number in asks if (handler := signal.getsignal(number)) not in (None, signal.SIG_IGN)}
    for number in before:
        signal.signal(number, lambda got, _: waiting.append(got))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if waiting:
            signal.raise_signal(waiting[0])


def sweep(target: Path) -> None:
    """Remove what killed exports to `target` left; a bundle that one of them had moved aside goes back."""
    names = re.compile(rf"\.{re.escape(target.name)}\.([0-9a-f]{{8}})\.(?:partial|old)")
    for token in sorted({found[1] for name in os.listdir(target.parent) if (found := names.fullmatch(name))}):
        staging = Staging(target, token)
        try:
            staging.lock()
        except FileNotFoundError:
            staging.settle()
        except OSError:
            continue
        else:
            staging.remove()


def _remove(directory: Path) -> None:
    """As far as that is possible; also what was made read-only."""
    for name, _, _ in os.walk(directory):
        with contextlib.suppress(OSError):
            os.chmod(name, 0o700)
    shutil.rmtree(directory, ignore_errors=True)
