"""Ends process groups when the supervisor that started them is gone without having done so.

Run as a script of its own, standard library only, so that it costs little and nothing of the supervisor's trouble
reaches it. Standard input carries lines: `+123` watch process group 123, `-123` it has ended. The end of the input is
the end of the supervisor, kill -9 included: every group still watched gets SIGTERM, a few seconds, then SIGKILL.
"""

from __future__ import annotations

import os
import signal
import sys
import time

GRACE_S = 5.0
POLL_S = 0.05


def main() -> None:
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line.startswith("+"):
            groups.add(group)
        else:
            groups.discard(group)
    end(groups)


def end(groups: set[int]) -> None:
    """Stop every group, gently at first."""
    left = {group for group in groups if send(group, signal.SIGTERM)}
    deadline = time.monotonic() + GRACE_S
    while left and time.monotonic() < deadline:
        time.sleep(POLL_S)
        left = {group for group in left if send(group, 0)}
    for group in groups:
        send(group, signal.SIGKILL)


def send(group: int, number: int) -> bool:
    """Signal a group; tell whether there is anybody in it."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main()
