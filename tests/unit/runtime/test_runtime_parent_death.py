"""Children of a killed process."""

import os
import select
import signal
import subprocess
import sys

PARENT = """
import signal, subprocess, sys, time
from medialane.runtime.linux import dies_with_this_process
child = subprocess.Popen(["sleep", "60"], preexec_fn=dies_with_this_process(signal.SIGTERM))
print(child.pid, flush=True)
time.sleep(60)  # time: a leftover of a failed test ends by itself
"""

ORPHAN = """
import os, signal, sys
from medialane.runtime.linux import signal_on_parent_death
alive = signal_on_parent_death(signal.SIGKILL, parent_pid=os.getppid())
gone = signal_on_parent_death(signal.SIGKILL, parent_pid=os.getpid())
print(alive, gone)
"""

FOSTERED = """
import os, signal
from medialane.runtime.linux import dies_with_this_process
before_exec = dies_with_this_process(signal.SIGTERM)
if not (child := os.fork()):
    if not os.fork():  # its parent is not the process that asked
        before_exec()
        os._exit(0)
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def run(script):
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()


def test_child_ends_when_its_parent_is_killed():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
        ended, _, _ = select.select([child], [], [], 10)
        os.close(child)
    assert ended


def test_already_dead_parent_is_detected():
    assert run(ORPHAN) == ["True", "False"]


def test_child_whose_parent_was_killed_between_fork_and_exec_is_not_started():
    assert run(FOSTERED) == ["1"]
