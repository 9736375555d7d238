"""The kernel's parent-death signal (prctl(2), PR_SET_PDEATHSIG): a child ends although its parent was killed.

The signal is sent when the *thread* that made the child ends. So a child is made from a thread that lives as long as
its process: the main thread.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from signal import Signals

_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
_libc.prctl.restype = ctypes.c_int


def signal_on_parent_death(number: Signals, *, parent_pid: int) -> bool:
    """Have the kernel send `number` to this process when its parent ends. False if the process `parent_pid` is not the
    parent any more: it has ended already, and no signal will come. Raises OSError."""
    if _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    return os.getppid() == parent_pid


def dies_with_this_process(number: Signals) -> Callable[[], None]:
    """What `subprocess.Popen` takes as `preexec_fn`: the child gets `number` when this process ends."""
    parent_pid = os.getpid()

    def between_fork_and_exec() -> None:
        """Nothing here takes a lock that another thread may hold: the library is loaded already."""
        if not signal_on_parent_death(number, parent_pid=parent_pid):
            os._exit(1)

    return between_fork_and_exec
