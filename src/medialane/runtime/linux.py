"""What Linux does for a process that Python does not wrap: ends with its parent, orphans, isolation, titles.

The parent-death signal (prctl(2), PR_SET_PDEATHSIG) terminates a child even if its parent was killed. It is sent when
the *thread* that created the child exits. So children are created from the main thread, which lives as long as its
process.

The children of a subreaper (PR_SET_CHILD_SUBREAPER) become the orphans among its descendants, instead of init's. So one
of its children may fork others for it: a fork of a fork that exits at once is an orphan, and becomes a child of the
subreaper, is waited for, and dies with its parent, as if it had been started there.

Isolation: a folder that somebody has cloned may have a `json.py` or a `vllm.py`. Python imports them if the folder is
the working directory and the program is given by `-m` or `-c`, or if PYTHONPATH has an empty entry. Our command lines
have `-P`; the variables set here do the same for processes that libraries start (vLLM runs `python -m`,
multiprocessing `python -c`), and for theirs.

A title, which `ps` and `top` show instead of the interpreter's command line, is written over the arguments and the
environment with which the process was executed, so /proc/PID/environ is overwritten as well; os.environ is not
affected. A fork has its parent's title until it sets its own.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from errno import EAGAIN
from signal import Signals
from typing import Final, NoReturn

import setproctitle

from medialane.types.errors import StartupFailed

libc = ctypes.CDLL(None, use_errno=True)
libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
libc.prctl.restype = ctypes.c_int
libc.syscall.restype = ctypes.c_long
libc.statfs.argtypes = [ctypes.c_char_p, ctypes.c_void_p]

#: Larger than struct statfs on any architecture.
_STATFS_BYTES = 256


def exit_at_once(status: int) -> NoReturn:
    """End this process, with what it has logged and printed written, but without the interpreter's shutdown: the
    engine's libraries print errors during it."""
    import logging  # what starts fast does without

    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def last_error(call: str) -> OSError:
    """Return the error of the last call, which has failed."""
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")


def file_system_type(path: str) -> int:
    """Return the magic number of the file system (statfs(2)) that has this file or folder. Raises OSError."""
    buffer = (ctypes.c_long * (_STATFS_BYTES // ctypes.sizeof(ctypes.c_long)))()
    if libc.statfs(os.fsencode(path), buffer):
        raise last_error("statfs")
    return buffer[0]  # f_type is the first member


_PR_SET_PDEATHSIG = 1


def signal_on_parent_death(number: Signals, *, parent_pid: int) -> bool:
    """Have the kernel send `number` to this process when its parent exits. Return False if `parent_pid` is no longer
    the parent: it has already exited, and no signal will be sent. Raises OSError."""
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise last_error("prctl(PR_SET_PDEATHSIG)")
    return os.getppid() == parent_pid


def dies_with_this_process(number: Signals) -> Callable[[], None]:
    """Return a `preexec_fn` for `subprocess.Popen`: the child gets `number` when this process exits."""
    parent_pid = os.getpid()

    def between_fork_and_exec() -> None:
        """Must not take a lock that another thread may hold at fork; libc is already loaded."""
        if not signal_on_parent_death(number, parent_pid=parent_pid):
            os._exit(1)

    return between_fork_and_exec


_PR_SET_CHILD_SUBREAPER = 36
#: An orphan becomes the subreaper's child within a millisecond, unless that has exited.
_REPARENT_S = 5.0


def set_subreaper(*, on: bool) -> None:
    """Make orphans of this process's descendants its own children from now on, or no longer. Raises OSError."""
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0) != 0:
        raise last_error("prctl(PR_SET_CHILD_SUBREAPER)")


def reap_orphans(own: Collection[int]) -> None:
    """Reap the children that have exited, except `own`, for which somebody waits. One that nobody has waited
    for yet may postpone the others to the next call."""
    with suppress(ChildProcessError):  # there is no child
        while (exited := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if exited.si_pid in own:
                return
            os.waitpid(exited.si_pid, os.WNOHANG)


def fork_child_of(subreaper: int) -> bool:
    """Fork a process that becomes a child of `subreaper`, this process's parent. Return True in the new process, once
    it is. Raises OSError."""
    middle = os.fork()
    if middle:
        if os.waitpid(middle, 0)[1]:
            raise OSError(EAGAIN, "there are not enough processes or memory for a fork")
        return False
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        os._exit(1)
    deadline = time.monotonic() + _REPARENT_S
    while os.getppid() != subreaper:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.001)  # until the process that has forked this one is gone
    return True


_PR_SET_DUMPABLE = 4
#: Files that libraries read in the working directory, and the variables that do the same. They may name folders of
#: compiled code (NUMBA_CACHE_DIR, UCX_MODULE_DIR), so reading them is running what is there.
_READ_HERE: Final = {".numba_config.yaml": "NUMBA_...", "ucx.conf": "UCX_..."}


def import_nothing_from_here() -> None:
    """Neither this process, from now on, nor processes that inherit its environment import from the working directory:
    of PYTHONPATH they have only the absolute paths."""
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


#: The process that others are forked from.
WARM: Final = "warm"


def reserve_title() -> None:
    """Find the memory of the title. To be called before the environment is changed: it is not found afterwards, and
    the process keeps its command line."""
    setproctitle.getproctitle()


def set_title(name: str, argv: Iterable[str] = ()) -> None:
    """Show this process as `medialane NAME`, followed by arguments, which must have no secrets.

    What does not fit into the command line and environment with which the process was executed is cut off.
    """
    setproctitle.setproctitle(" ".join(["medialane", name, *argv]))


def has_title(pid: int, name: str) -> bool:
    """Return whether a process has this title. Its arguments are not compared."""
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            title = file.read()
    except OSError:
        return False  # it has exited
    return title.rstrip("\0") == f"medialane {name}" or title.startswith(f"medialane {name} ")
