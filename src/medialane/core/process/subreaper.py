"""A process whose children become the orphans among its descendants, instead of init's (prctl(2),
PR_SET_CHILD_SUBREAPER).

So another process may fork children for it: the fork exits at once, and its own fork, now an orphan, becomes a child
here, is waited for, and dies with its parent (`parent_death`), as if it had been started here.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress

from medialane.core.process.libc import last_error, libc

_PR_SET_CHILD_SUBREAPER = 36


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
