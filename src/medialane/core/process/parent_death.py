"""The parent-death signal (prctl(2), PR_SET_PDEATHSIG) terminates a child even if its parent was killed.

The signal is sent when the *thread* that created the child exits. So children are created from the main thread, which
lives as long as its process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from signal import Signals

from medialane.core.process.libc import last_error, libc

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
