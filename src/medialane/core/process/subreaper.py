"""A process whose children become the orphans among its descendants, instead of init's (prctl(2),
PR_SET_CHILD_SUBREAPER).

So one of its children may fork others for it: a fork of a fork that exits at once is an orphan, and becomes a child of
the subreaper, is waited for, and dies with its parent (`parent_death`), as if it had been started there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from contextlib import suppress
from errno import EAGAIN

from medialane.core.process.libc import last_error, libc

_PR_SET_CHILD_SUBREAPER = 36
#: An orphan becomes the subreaper's child within a millisecond, unless that has exited.
_REPARENT_S = 5.0


def set_subreaper(*, on: bool) -> None:
    """Make orphans of this process's descendants its own children from now on, or no longer. Raises OSError."""
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0) != 0:
        raise last_error("prctl(PR_SET_CHILD_SUBREAPER)")


def reap_orphans(own: Collection[int]) -> None:
    """Reap the children that have exited, except `own`, for which somebody waits. One of those that nobody has waited
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
