"""Files of this user alone: private ones; small ones that settings name; and files that an owner locks, so that they
are removed when it has exited.

What we write is private, whatever the umask: logs, settings and answers contain what others must not know.

An owner holds an exclusive flock(2) on its file while it runs; the kernel drops the lock with the owner's last
descriptor, also after kill -9. So a process that obtains the lock has found a file without an owner, and may remove it.
The lock belongs to the open file description: a forked child that inherits the descriptor keeps it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from medialane.types.errors import StartupFailed

#: Removed in the meantime; another user's; a symbolic link; a socket: not ours, whatever its name.
_NOT_OURS = {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENXIO}

_LOCK = "owner.lock"
#: Ends the name of a folder that is being removed.
_ENDED = ".ended"
#: Largest file that is read: a secret, or a chain of certificates.
_MAX_BYTES = 1 << 20


def private(path: str, flags: int) -> int:
    """Open a file for `open(..., opener=private)`. One that exists becomes private as well."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor


def write_private(path: Path, data: bytes) -> None:
    """Write a whole file. Raises OSError."""
    with open(path, "wb", opener=private) as file:
        file.write(data)


def replace_private(path: Path, data: bytes) -> None:
    """Write a whole file; others read the old state or the new one. Raises OSError."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    write_private(unfinished, data)
    unfinished.replace(path)


def read(path: str, setting: str) -> tuple[bytes, int]:
    """Return the content and the mode of a regular file. Raises StartupFailed."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:  # closes the descriptor of a folder, too
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise StartupFailed(f"{setting} {path} is not a file")
            content = file.read(_MAX_BYTES + 1)
            if len(content) > _MAX_BYTES:
                raise StartupFailed(f"{setting} {path} has more than {_MAX_BYTES} bytes")
            return content, stat.S_IMODE(mode)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise StartupFailed(f"cannot read {setting} {path}: {reason}") from error


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def read_private(path: str, setting: str) -> bytes:
    """Return the content of a file that other users cannot access. Raises StartupFailed."""
    content, mode = read(path, setting)
    if mode & stat.S_IRWXO:
        raise StartupFailed(f"{setting} {path} has mode {mode:04o}, so any user can access it: chmod o-rwx")
    return content


def try_lock(descriptor: int) -> bool:
    """Lock an open file without waiting. Return False if another process holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def has_one_owner(path: str) -> bool:
    """Return whether a process holds the lock of this file for itself, as of an `OwnedFolder`."""
    descriptor = _open(path)
    if descriptor is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextmanager
def abandoned(path: str | Path) -> Iterator[int | None]:
    """Yield a read-only descriptor of the file, with its lock held, if it is a regular file of this user without an
    owner; otherwise None. Raises OSError if the file cannot be checked."""
    descriptor = _open(path)
    if descriptor is None:
        yield None
        return
    try:
        yield descriptor if _is_abandoned(descriptor, path) else None
    finally:
        os.close(descriptor)


def make_own_folder(path: Path) -> None:
    """Create a folder of mode 0700 with a name that others know, if it is missing. Raises StartupFailed if another user
    was faster, OSError."""
    path.mkdir(mode=0o700, exist_ok=True)
    if not _is_own_folder(path):
        raise StartupFailed(f"{path} belongs to another user")


class OwnedFolder:
    """A folder of mode 0700 that is removed by its owner, or by the next `create` after its owner was killed.

    The lock is on a file inside. The folder gets its final name only after it is locked, and only final names are
    reaped.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock: int | None = lock

    @classmethod
    def create(cls, parent: Path, prefix: str, *, num_kept: int = 0) -> OwnedFolder:
        """Create a folder in `parent`, after removing folders of this prefix whose owners have exited, except the
        `num_kept` newest. Raises StartupFailed."""
        try:
            reap_folders(parent, prefix, num_kept=num_kept)
            unfinished = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=parent))
            lock = os.open(unfinished / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = parent / unfinished.name.removeprefix(".")
            unfinished.rename(path)
        except OSError as error:
            raise StartupFailed(f"cannot create a private folder in {parent}: {error.strerror}") from error
        return cls(path, lock)

    def close(self, *, keep: bool = False) -> None:
        """Remove the folder; with `keep` it stays for inspection, see `create`. Idempotent."""
        if self._lock is None:
            return
        if not keep:
            _remove(self.path)
        os.close(self._lock)
        self._lock = None


class SharedFolder:
    """A folder of mode 0700 with a known name, for several processes of this user: the last of them removes it, or
    `reap_folders` after they were killed.

    Each holds a shared lock on the file inside. `close` gives that up before it tries to get the exclusive lock, so
    that the last of several that close at once gets it.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock: int | None = lock

    @classmethod
    def join(cls, path: Path) -> SharedFolder:
        """Create the folder, or use it with the others. Raises StartupFailed."""
        while True:
            try:
                make_own_folder(path)
                lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except FileNotFoundError:
                continue  # removed by the last of its previous users
            except OSError as error:
                raise StartupFailed(f"cannot create the private folder {path}: {error.strerror}") from error
            fcntl.flock(lock, fcntl.LOCK_SH)
            if _is_at(path / _LOCK, lock):
                return cls(path, lock)
            os.close(lock)

    def close(self) -> None:
        """Stop using the folder. Idempotent."""
        if self._lock is None:
            return
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        if try_lock(self._lock) and _is_at(self.path / _LOCK, self._lock):
            _remove(self.path)
        os.close(self._lock)
        self._lock = None


def reap_folders(parent: Path, prefix: str, *, num_kept: int = 0) -> list[Path]:
    """Remove this user's `OwnedFolder`s in `parent` whose owners have exited, except the `num_kept` newest; return
    their paths."""
    removed = []
    for path in sorted(filter(_is_own_folder, parent.glob(f"{prefix}*")), key=_modified_at, reverse=True):
        with abandoned(path / _LOCK) as lock:
            if lock is None:
                continue
            if num_kept:
                num_kept -= 1
            else:
                _remove(path)
                removed.append(path)
    return removed


def _remove(folder: Path) -> None:
    """Remove a folder whose lock this process holds. It is renamed first: processes that end meanwhile, as an engine's
    do, cannot create files in it by its path. The lock goes last: without it, nobody would remove what is left."""
    ended = folder.with_name(f"{folder.name}{_ENDED}")
    with suppress(OSError):
        folder.rename(ended)
        for path in ended.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != _LOCK:
                path.unlink(missing_ok=True)
    shutil.rmtree(ended, ignore_errors=True)


def _open(path: str | Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NOT_OURS:
            return None
        raise


def _is_abandoned(descriptor: int, path: str | Path) -> bool:
    """Return whether the file has no owner, and lock it then."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or not try_lock(descriptor):
        return False
    return _is_at(path, descriptor)


def _is_at(path: str | Path, descriptor: int) -> bool:
    """Return whether the open file is at this path: it may have been renamed or removed since it was opened."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _is_own_folder(path: Path) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _modified_at(path: Path) -> float:
    """Return when a folder was last changed; 0 if it has been removed meanwhile."""
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0
