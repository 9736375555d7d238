"""Files that only this user may read: those that we write, whatever the umask (logs, settings and answers tell what
others must not know), and the small ones that settings name: secrets, keys, certificates."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from medialane.types.errors import StartupFailed

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
    """Write a whole file, of which others read the old state or the new one. Raises OSError."""
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
