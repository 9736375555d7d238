"""Compiles the native functions (in files named native_*.py) with numba.

Compilation takes a dozen seconds, so machine code is cached on disk. Numba invalidates a cached function when its own
file changes, but not when another file changes whose functions were inlined into it. So the cache directory is named by
the digest of all native files of the package.

If no such directory is writable, numba searches for another by its own rules; if there is none, functions are compiled
again in each process, which only makes the start slow.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import numba

logger = logging.getLogger(__name__)

_F = TypeVar("_F", bound=Callable[..., object])


def compiled(function: _F) -> _F:
    """Compile the function on its first call. Pass contiguous, writable arrays only: every other array type triggers a
    compilation of its own, during a request."""
    return _compiled(function)


def compiled_part(function: _F) -> _F:
    """Compile a function for compiled callers only: it has no Python entry point, a call from Python crashes."""
    found: _F = numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
    return found


def compiled_for(signature: object, *, nogil: bool = False) -> Callable[[_F], _F]:
    """Compile the function for one signature when its module is imported.

    With `nogil` it runs without the GIL: no other thread may change its arrays in the meantime.
    """
    return lambda function: _compiled(function, signature, nogil=nogil)


def _compiled(function: _F, *signature: object, nogil: bool = False) -> _F:
    previous, numba.config.CACHE_DIR = numba.config.CACHE_DIR, numba.config.CACHE_DIR or _folder(function)
    try:
        found: _F = numba.njit(*signature, cache=True, nogil=nogil)(function)
    except RuntimeError:  # numba found no writable cache directory
        _warn_once()
        found = numba.njit(*signature, nogil=nogil)(function)
    finally:
        numba.config.CACHE_DIR = previous
    return found


@lru_cache(maxsize=1)
def _warn_once() -> None:
    logger.warning("no writable cache for compiled code (set NUMBA_CACHE_DIR): compiling at each start")


def _folder(function: Callable[..., object]) -> str:
    return _folder_of(Path(function.__code__.co_filename).parent)


@lru_cache
def _folder_of(package: Path) -> str:
    """Return a directory in `__pycache__` or in the user's cache; empty if neither is writable."""
    digest = blake2b(digest_size=8)
    for path in sorted(package.glob("native_*.py")):
        digest.update(path.read_bytes())
    name = f"native-{digest.hexdigest()}"
    for parent in (package / "__pycache__", Path("~/.cache/medialane").expanduser()):
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


def compile_loops_for_one_thread() -> None:
    """Make numba compile functions that other libraries declare parallel (Kimi-K2.5's image processor) as ordinary ones
    from now on, with equal results: numba's threads do not survive a fork. Such a function is not cached: the parallel
    one has the same name in the cache."""
    compile_parallel = numba.njit

    def njit(*args: Any, **options: Any) -> Any:
        alone = {"parallel": False, "cache": False} if options.get("parallel") else {}
        return compile_parallel(*args, **options | alone)

    numba.njit = njit
