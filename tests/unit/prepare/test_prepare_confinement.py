import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from preparer_pools import is_running

from medialane.prepare import forkserver_environment, sandbox
from medialane.types.errors import StartupFailed
from waiting import wait_until


def exit_code(work: Callable[[], object]) -> int:
    """Of a forked child that does `work`."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
    assert child.exitcode is not None
    return child.exitcode


def in_child(check: Callable[[], bool]) -> bool:
    """The result of a forked child: limits cannot be undone."""
    return exit_code(lambda: sys.exit(not check())) == 0


def test_memory_limit_is_enforced():
    def check() -> bool:
        sandbox.limit_memory(128 << 20)
        np.zeros(64 << 20, np.uint8)
        try:
            np.zeros(256 << 20, np.uint8)
        except MemoryError:
            return True
        return False

    assert in_child(check)


def test_zero_sets_no_limit():
    def check() -> bool:
        sandbox.limit_memory(0)
        return resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY

    assert in_child(check)


def test_core_dumps_are_disabled_and_the_oom_score_is_not_lowered():
    def check() -> bool:
        sandbox.drop_privileges()
        with open("/proc/self/oom_score_adj") as file:
            return resource.getrlimit(resource.RLIMIT_CORE) == (0, 0) and int(file.read()) >= 0

    assert in_child(check)


def test_fault_ends_the_process_despite_library_handlers():
    def fault() -> None:
        signal.signal(signal.SIGSEGV, lambda *_: None)
        sandbox.restore_fault_handlers()
        os.kill(os.getpid(), signal.SIGSEGV)

    assert exit_code(fault) == -signal.SIGSEGV


def test_all_sockets_except_the_kept_one_are_closed():
    kept, peer = socket.socketpair()
    other, far_end = socket.socketpair()

    def check() -> bool:
        sandbox.drop_sockets(keep=kept.fileno())
        kept.send(b"still here")
        try:
            other.send(b"gone")
        except OSError:
            return True
        return False

    with kept, peer, other, far_end:
        assert in_child(check)
        assert peer.recv(20) == b"still here"


@contextmanager
def second_thread(name):
    """Run a thread whose name in the kernel is `name`."""
    end, named = threading.Event(), threading.Event()

    def run():
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
        named.set()
        end.wait()

    thread = threading.Thread(target=run)
    thread.start()
    named.wait()
    try:
        yield
    finally:
        end.set()
        thread.join()


def rejection():
    """The error, empty without one: a process of pytest-xdist has threads of its own."""
    try:
        forkserver_environment.require_one_thread()
    except StartupFailed as error:
        return error.message
    return ""


def test_second_thread_is_rejected_by_name():
    assert "OpenBLAS" not in rejection()
    with second_thread("OpenBLAS"):
        assert "OpenBLAS" in rejection()


@pytest.mark.parametrize("name", ["cuda00001800007", "jemalloc_bg_thd"])
def test_threads_of_nvml_and_jemalloc_do_not_prevent_a_fork(name):
    before = rejection()
    with second_thread(name):
        assert rejection() == before


PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())], stdout=subprocess.PIPE)
print(child.pid, child.stdout.readline().decode(), flush=True)
input()
"""

CHILD = """
import sys, time
from medialane.prepare import forkserver_environment
forkserver_environment.die_with_parent(int(sys.argv[1]))
print("ready", flush=True)
time.sleep(60)  # time: a leftover of a failed test ends by itself
"""


def test_child_dies_with_its_parent():
    command = [sys.executable, "-c", PARENT, CHILD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        pid, word = parent.stdout.readline().split()
        assert word == "ready"
        assert is_running(int(pid))
        parent.kill()
        parent.wait()
    wait_until(lambda: not is_running(int(pid)))


def test_child_of_a_dead_parent_exits_immediately():
    def check() -> bool:
        try:
            forkserver_environment.die_with_parent(os.getppid() + 1)
        except SystemExit:
            return True
        return False

    assert in_child(check)
