"""Files that only this user may read, whatever the umask: logs, settings and answers tell what others must not know."""

from __future__ import annotations

import os
from pathlib import Path


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
