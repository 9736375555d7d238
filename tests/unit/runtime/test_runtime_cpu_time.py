import os
import signal
import subprocess
import sys
import time

import pytest

from medialane.runtime.resources import used_cpu_s
from waiting import wait_until

SPINNING_CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def parent():
    """A process that sleeps; its child computes."""
    process = subprocess.Popen([sys.executable, "-c", SPINNING_CHILD], stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    yield process.pid, child
    os.kill(child, signal.SIGKILL)
    process.kill()
    process.wait()
    process.stdout.close()


def test_time_of_descendants_counts(parent):
    before = used_cpu_s([parent[0]])
    wait_until(lambda: used_cpu_s([parent[0]]) > before + 0.2)


@pytest.mark.parametrize("number", [0, 1])
def test_stopped_process_among_them_is_told(parent, number):
    os.kill(parent[number], signal.SIGSTOP)
    wait_until(lambda: used_cpu_s([parent[0]]) is None)
    os.kill(parent[number], signal.SIGCONT)
    wait_until(lambda: used_cpu_s([parent[0]]) is not None)


def test_sleeping_process_uses_next_to_nothing():
    process = subprocess.Popen(["sleep", "60"])
    try:
        before = used_cpu_s([process.pid])
        time.sleep(0.3)  # time: in which it might
        assert used_cpu_s([process.pid]) - before < 0.05
    finally:
        process.kill()
        process.wait()
    assert used_cpu_s([process.pid]) is None, "it has exited"
