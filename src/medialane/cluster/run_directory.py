"""A private folder for the sockets and logs of one supervisor's life.

Its owner holds an exclusive lock on the file `owner.lock` inside for as long as it lives; the kernel drops the lock
with the owner, kill -9 included. So whoever obtains the lock has found a folder without an owner, and may remove it.
The folder gets its final name only once it is locked, and only final names are looked at.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from medialane.core.errors import StartupFailed

_PREFIX = "medialane-run-"
_LOCK = "owner.lock"
#: sockaddr_un.sun_path has 108 bytes with its terminating zero (unix(7)), and sockets lie in our folder.
_MAX_PARENT_BYTES = 107 - len("/medialane-run-12345678/worker-9999.sock")


class RunDirectory:
    """An existing folder, mode 0700, and its lock."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock: int | None = lock

    @classmethod
    def create(cls, parent: Path) -> RunDirectory:
        """Make the folder below `parent`, after removing those of owners that are gone. Raises StartupFailed."""
        try:
            reap(parent)
            unfinished = tempfile.mkdtemp(prefix=".medialane-", dir=parent)
            lock = os.open(os.path.join(unfinished, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = parent / (_PREFIX + os.path.basename(unfinished).rpartition("-")[2])
            os.rename(unfinished, path)
        except OSError as error:
            raise StartupFailed(f"cannot make a folder for sockets and logs in {parent}: {error.strerror}") from error
        return cls(path, lock)

    def close(self, *, keep: bool = False) -> None:
        """Let go of the folder and remove it; with `keep` it stays, for somebody to read, until the next `reap`.

        Idempotent.
        """
        if self._lock is None:
            return
        if not keep:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = None


def parent_directory(environ: Mapping[str, str]) -> Path:
    """Where the folder belongs: XDG_RUNTIME_DIR, else the folder for temporary files, if short enough for sockets."""
    for candidate in (environ.get("XDG_RUNTIME_DIR", ""), environ.get("TMPDIR", "")):
        fits = candidate.startswith("/") and len(os.fsencode(candidate)) <= _MAX_PARENT_BYTES
        if fits and os.access(candidate, os.W_OK | os.X_OK):
            return Path(candidate)
    return Path("/tmp")  # noqa: S108 - mkdtemp makes what we use there, exclusively and private


def reap(parent: Path) -> list[Path]:
    """Remove this user's folders below `parent` whose owners are gone; return them."""
    removed = []
    for path in parent.glob(_PREFIX + "*"):
        with _abandoned(path) as abandoned:
            if abandoned:
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
    return removed


@contextmanager
def _abandoned(path: Path) -> Iterator[bool]:
    """Whether the folder is ours and nobody's; the lock is held meanwhile."""
    try:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            yield False
            return
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # gone meanwhile, or no folder of ours
        yield False
        return
    try:
        yield _try_lock(lock)
    finally:
        os.close(lock)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
