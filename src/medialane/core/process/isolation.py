"""Keeps a process apart from the folder in which it was started, and from other processes of its user.

A folder that somebody has cloned may have a `json.py` or a `vllm.py`. Python imports them if the folder is the working
directory and the program is given by `-m` or `-c`, or if PYTHONPATH has an empty entry. Our command lines have `-P`;
the variables set here do the same for processes that libraries start (vLLM runs `python -m`, multiprocessing
`python -c`), and for theirs.
"""

from __future__ import annotations

import os
import sys

from medialane.core.process.libc import last_error, libc

_PR_SET_DUMPABLE = 4


def import_nothing_from_here() -> None:
    """Neither this process, from now on, nor those that inherit its environment import from the working directory: of
    PYTHONPATH they have only the absolute paths."""
    given = os.environ.pop("PYTHONPATH", "").split(os.pathsep)
    absolute = [path for path in given if os.path.isabs(path)]
    relative = {os.path.abspath(path) for path in given} - set(absolute) if any(given) else set()
    if absolute:
        os.environ["PYTHONPATH"] = os.pathsep.join(absolute)
    os.environ["PYTHONSAFEPATH"] = "1"
    sys.path[:] = [path for path in sys.path if os.path.isabs(path) and path not in relative]


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
