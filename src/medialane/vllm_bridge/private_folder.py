"""A private folder for the sockets of one engine, which no kill leaves behind for long.

vLLM makes its own sockets in the folder for temporary files, and leaves those of processes that were ended there; it
makes them in ours instead, beside those of its KV events (`enter`).

Its owner holds a lock on the folder itself; the kernel drops it with the owner (and the processes it has forked). So
whoever obtains the lock has found a folder without an owner, and may remove it; each new one does. The folder gets its
final name only once it is locked, and only final names are looked at.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

from medialane.core.errors import StartupFailed

_PREFIX = "medialane-vllm-"

#: Where vLLM makes its sockets.
_VARIABLE = "VLLM_RPC_BASE_PATH"

#: sockaddr_un.sun_path has 108 bytes with its terminating zero (unix(7)); vLLM's sockets are named by a UUID.
_MAX_PARENT_BYTES = 107 - len(f"/{_PREFIX}12345678/") - 36


class PrivateFolder:
    """An existing folder, mode 0700, in that of VLLM_RPC_BASE_PATH or else in the folder for temporary files; in /tmp
    where its path would be too long for sockets. Raises StartupFailed."""

    def __init__(self) -> None:
        self._outer = os.environ.get(_VARIABLE)
        parent = Path(self._outer or tempfile.gettempdir())
        if len(os.fsencode(parent)) > _MAX_PARENT_BYTES:
            parent = Path("/tmp")  # noqa: S108 - mkdtemp makes what we use there, exclusively and private
        try:
            reap(parent)
            unfinished = Path(tempfile.mkdtemp(prefix="." + _PREFIX, dir=parent))
            self._lock: int | None = _locked(unfinished)
            self.path = parent / unfinished.name.removeprefix(".")
            unfinished.rename(self.path)
        except OSError as error:
            raise StartupFailed(f"cannot make a folder for sockets in {parent}: {error.strerror}") from error

    def enter(self) -> None:
        """Have vLLM, in this process and those that it starts, make its sockets in the folder, until it is removed."""
        os.environ[_VARIABLE] = str(self.path)

    def remove(self) -> None:
        """Idempotent."""
        if os.environ.get(_VARIABLE) == str(self.path):
            del os.environ[_VARIABLE]
            if self._outer is not None:
                os.environ[_VARIABLE] = self._outer
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def reap(parent: Path) -> None:
    """Remove this user's folders below `parent` whose owners are gone."""
    for path in parent.glob(_PREFIX + "*"):
        found = path.lstat() if path.exists() else None
        if found is None or not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            continue
        try:
            lock = _locked(path)
        except OSError:  # somebody's, or gone meanwhile
            continue
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _locked(path: Path) -> int:
    """The folder's descriptor, with the lock. Raises OSError (BlockingIOError if another has it)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
