"""How native functions, which stand in files named native_*.py, are compiled: by numba.

Compiling takes a dozen seconds, so machine code is kept on disk. Numba drops what it kept of a function when the file
of that function changes, and does not see that another file changed whose functions were compiled into it. So it is
kept in a folder named by the digest of all native files of a room: what any of them says is part of where the code is.

Where no such folder can be written, numba looks for another by its own rules, and where there is none, functions are
compiled anew in each process: a slow start, and nothing else.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

import numba

logger = logging.getLogger(__name__)

_F = TypeVar("_F", bound=Callable[..., object])


def compiled(function: _F) -> _F:
    """The function, compiled on its first call. Its arrays must be contiguous and writable: each other kind of array
    would be compiled for anew, and take a request's time for that."""
    return _compiled(function)


def compiled_part(function: _F) -> _F:
    """A function that compiled ones call: it becomes part of them. It has no entry for Python, where a call of it would
    be a segmentation fault."""
    found: _F = numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
    return found


def compiled_for(signature: object, *, nogil: bool = False) -> Callable[[_F], _F]:
    """The function, compiled for arguments of one kind when its module is imported.

    `nogil` lets it run without the interpreter lock: nobody may change its arrays meanwhile.
    """
    return lambda function: _compiled(function, signature, nogil=nogil)


def _compiled(function: _F, *signature: object, nogil: bool = False) -> _F:
    own, numba.config.CACHE_DIR = numba.config.CACHE_DIR, numba.config.CACHE_DIR or _folder(function)
    try:
        found: _F = numba.njit(*signature, cache=True, nogil=nogil)(function)
    except RuntimeError:  # numba's way to say that it can write nowhere
        _warn_once()
        found = numba.njit(*signature, nogil=nogil)(function)
    finally:
        numba.config.CACHE_DIR = own
    return found


@lru_cache(maxsize=1)
def _warn_once() -> None:
    logger.warning("no writable cache for compiled code (set NUMBA_CACHE_DIR): it is compiled at each start")


def _folder(function: Callable[..., object]) -> str:
    return _folder_of(Path(function.__code__.co_filename).parent)


@lru_cache
def _folder_of(room: Path) -> str:
    """Beside the bytecode, or in the user's cache; empty if neither can be written."""
    digest = blake2b(digest_size=8)
    for path in sorted(room.glob("native_*.py")):
        digest.update(path.read_bytes())
    name = f"native-{digest.hexdigest()}"
    for parent in (room / "__pycache__", Path("~/.cache/medialane").expanduser()):
        if _is_writable(parent / name):
            return str(parent / name)
    return ""


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True
