"""Keeps a process apart from the folder in which it was started, and from other processes of its user.

A folder that somebody has cloned may have a `json.py` or a `vllm.py`. Python imports them if the folder is the working
directory and the program is given by `-m` or `-c`, or if PYTHONPATH has an empty entry. Our command lines have `-P`;
the variables set here do the same for processes that libraries start (vLLM runs `python -m`, multiprocessing
`python -c`), and for theirs.
"""

from __future__ import annotations

import os
import sys
from typing import Final

from medialane.core.errors import StartupFailed
from medialane.core.process.libc import last_error, libc

_PR_SET_DUMPABLE = 4
#: Files that libraries read in the working directory, and the variables that do the same. They may name folders of
#: compiled code (NUMBA_CACHE_DIR, UCX_MODULE_DIR), so reading them is running what is there.
_READ_HERE: Final = {".numba_config.yaml": "NUMBA_...", "ucx.conf": "UCX_..."}


def import_nothing_from_here() -> None:
    """Neither this process, from now on, nor those that inherit its environment import from the working directory: of
    PYTHONPATH they have only the absolute paths."""
    variable = os.environ.pop("PYTHONPATH", "")
    given = variable.split(os.pathsep) if variable else []
    absolute = [path for path in given if os.path.isabs(path)]
    relative = {os.path.abspath(path) for path in given} - set(absolute)
    if absolute:
        os.environ["PYTHONPATH"] = os.pathsep.join(absolute)
    os.environ["PYTHONSAFEPATH"] = "1"
    sys.path[:] = [path for path in sys.path if os.path.isabs(path) and path not in relative]


def refuse_library_settings() -> None:
    """Raise StartupFailed if the working directory has settings of a library, which has no switch for not reading
    them."""
    for name, variables in _READ_HERE.items():
        if os.path.lexists(name):
            raise StartupFailed(
                f"{name} in the working directory may have code loaded from anywhere: start in another one, or remove "
                f"it (variables do the same: {variables})"
            )


def hide_memory() -> None:
    """Refuse other processes of this user, which may decode hostile files, this one's memory, environment and open
    files, unless they have CAP_SYS_PTRACE. Forks inherit it, programs that are exec'ed do not. Raises OSError."""
    _set_dumpable(is_dumpable=False)


def show_memory() -> None:
    """Undo `hide_memory`, in a fork of such a process. Raises OSError."""
    _set_dumpable(is_dumpable=True)


def _set_dumpable(*, is_dumpable: bool) -> None:
    if libc.prctl(_PR_SET_DUMPABLE, int(is_dumpable), 0, 0, 0) != 0:
        raise last_error("prctl(PR_SET_DUMPABLE)")
