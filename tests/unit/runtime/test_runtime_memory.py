"""The memory of processes: what they share counts once."""

import asyncio
import mmap
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from medialane.runtime.resources import INTERVAL_S, MIN_PAUSE, MemoryUse, pss_bytes

MIB = 1 << 20
SIZE = 128 * MIB
#: Libraries' pages count more when another process that has mapped them exits.
OF_FILES = 24 * MIB


@contextmanager
def fork():
    """The pid of a fork that only waits."""
    pid = os.fork()
    if pid == 0:
        while True:
            signal.pause()
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_pages_of_forks_count_once():
    alone = pss_bytes(os.getpid())
    held = b"\1" * SIZE
    before = pss_bytes(os.getpid())
    assert before - alone == pytest.approx(SIZE, abs=OF_FILES)
    with fork() as first, fork() as second:
        pids = (os.getpid(), first, second)
        sizes = [pss_bytes(pid) for pid in pids]
        assert sum(sizes) == pytest.approx(before, abs=OF_FILES)
        assert max(sizes) < before * 0.6
    assert len(held) == SIZE


def test_shared_memory_is_left_out():
    before = pss_bytes(os.getpid())
    with mmap.mmap(-1, SIZE) as shared:  # MAP_SHARED
        shared.write(b"\1" * SIZE)
        assert pss_bytes(os.getpid()) - before < SIZE / 2


def test_process_that_has_exited_is_left_out_alone_and_as_a_zombie():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        sizes = MemoryUse(lambda: {"gateway": [os.getpid(), process.pid], "store": [process.pid]}).read()
        process.wait()
    assert sizes.keys() == {"gateway"}
    assert MemoryUse(lambda: {"store": [process.pid]}).read() == {}


class Counted:
    """Processes whose reading takes `duration_s` of a clock."""

    def __init__(self, clock, duration_s=0.0):
        self.clock, self.duration_s, self.num_reads = clock, duration_s, 0
        self.use = MemoryUse(self._pids, clock=clock, cpu_clock=lambda: clock.now)

    def _pids(self):
        self.num_reads += 1
        self.clock.now += self.duration_s
        return {"gateway": [os.getpid()]}


def test_memory_is_read_again_after_the_interval(clock):
    counted = Counted(clock)
    first = counted.use.read()
    assert first.keys() == {"gateway"}
    clock.now += INTERVAL_S / 2
    assert counted.use.read() is first
    clock.now += INTERVAL_S / 2
    assert counted.use.read() is not first
    assert counted.num_reads == 2


def test_memory_that_takes_long_to_read_is_read_more_rarely(clock):
    counted = Counted(clock, duration_s=INTERVAL_S / 50)
    counted.use.read()
    for _ in range(int(MIN_PAUSE / 50) - 1):
        clock.now += INTERVAL_S
        counted.use.read()
    assert counted.num_reads == 1
    clock.now += 2 * INTERVAL_S
    counted.use.read()
    assert counted.num_reads == 2


async def test_read_that_hangs_delays_nobody_and_is_not_repeated():
    hangs, num_reads = threading.Event(), 0

    def pids():
        nonlocal num_reads
        num_reads += 1
        hangs.wait(10)
        return {"gateway": [os.getpid()]}

    use = MemoryUse(pids)
    await use.refresh(0.01)
    await use.refresh(0.01)
    assert (use.latest, num_reads) == ({}, 1)
    hangs.set()
    async with asyncio.timeout(5):
        while not use.latest:
            await use.refresh(0.01)
    assert num_reads == 1
