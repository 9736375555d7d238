"""The processes below one, in its process group or not."""

import os
import subprocess
import sys

from medialane.runtime.resources import children, descendants, group_below

#: Starts another one, prints its pid, and waits.
PROGRAM = """
import subprocess, sys
below = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print(below.pid, flush=True)
input()
"""


def test_processes_of_another_group_are_not_counted_as_own():
    words = [sys.executable, "-c", PROGRAM]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, **pipes) as own, subprocess.Popen(words, **pipes, start_new_session=True) as other:
        below_own, below_other = int(own.stdout.readline()), int(other.stdout.readline())
        assert {own.pid, other.pid} <= set(children(os.getpid()))
        assert {own.pid, other.pid, below_own, below_other} <= set(descendants(os.getpid()))
        in_group = set(group_below())
        assert {own.pid, below_own} <= in_group
        assert not {other.pid, below_other} & in_group
        for process in (own, other):
            process.communicate(b"\n")


def test_process_that_has_exited_has_no_descendants():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        assert list(descendants(process.pid)) == []
