import asyncio
import os
import signal
import subprocess
import sys

import pytest

from medialane.runtime import heartbeat
from medialane.runtime.heartbeat import HangWatch, HeartbeatPipe, beat, beating, pause
from medialane.runtime.resources import Activity, activity
from waiting import eventually, wait_until

TICK_S = 0.01


class Process:
    """What the kernel says of a process: at each tick it has `state`, and has computed and waited for so long."""

    def __init__(self, state="S", cpu_s=0.0, waited_s=0.0):
        self.now = Activity(state, 0.0, 0.0)
        self.step = (cpu_s, waited_s)
        self.num_ticks = 0

    def watch(self, pipe=None):
        return HangWatch(1, pipe, tick_s=TICK_S, activity=self._at_tick)

    def _at_tick(self, _pid):
        self.num_ticks += 1
        state, cpu_s, waited_s = self.now
        self.now = Activity(state, cpu_s + self.step[0], waited_s + self.step[1])
        return self.now


async def hangs_after(watch, process):
    """The number of ticks after which the process is found to hang; None if it is not within 100."""
    watching = asyncio.create_task(watch.hung())
    try:
        await eventually(lambda: watching.done() or process.num_ticks > 100, "it hangs, or not")
        return process.num_ticks if watching.done() else None
    finally:
        watching.cancel()
        await asyncio.wait([watching])


@pytest.mark.parametrize(
    ("process", "num_ticks"),
    [
        ({}, 10),
        ({"cpu_s": TICK_S}, 30),
        ({"cpu_s": TICK_S / 100}, 10),
        ({"state": "T"}, 10),
        ({"state": "t"}, None),
        ({"waited_s": TICK_S}, 30),
        ({"waited_s": TICK_S / 2}, 20),
    ],
    ids=["idle", "computing", "timers", "stopped", "in a debugger", "without a core", "with half a core"],
)
async def test_silent_process_hangs_once_it_could_have_sent_a_beat(process, num_ticks):
    found = Process(**process)
    watch = found.watch()
    watch.beat()
    after = await hangs_after(watch, found)
    assert after is None if num_ticks is None else num_ticks <= after <= num_ticks + 3


@pytest.mark.parametrize(("state", "hangs"), [("S", False), ("D", False), ("t", False), ("T", True)])
async def test_process_that_has_not_begun_its_beats_hangs_only_if_it_is_stopped(state, hangs):
    process = Process(state)
    assert (await hangs_after(process.watch(), process) is not None) == hangs


async def test_time_that_the_supervisor_sleeps_through_is_one_tick():
    process = Process()
    watch = process.watch()
    watch.beat()
    watching = asyncio.create_task(watch.hung())
    await eventually(lambda: process.num_ticks >= 3)
    stops = f"kill -STOP {os.getpid()}; sleep 1; kill -CONT {os.getpid()}"
    await asyncio.to_thread(subprocess.run, ["/bin/sh", "-c", stops], check=True)
    assert not watching.done(), "with the time in which nothing ran it would be"
    watching.cancel()
    await asyncio.wait([watching])


@pytest.fixture
def pipe(monkeypatch):
    pipe = HeartbeatPipe()
    for name, value in pipe.environ.items():
        monkeypatch.setenv(name, value)
    with pipe.passed():
        yield pipe
    pipe.close()


async def test_event_loop_that_runs_sends_beats_and_announces_its_end(pipe):
    async with beating():
        await eventually(lambda: pipe.read() == b"+")
    assert pipe.read() == b"-"


async def test_beats_through_the_pipe_prevent_and_a_pause_excuses(pipe):
    process = Process()
    watch = process.watch(pipe)
    watching = asyncio.create_task(watch.hung())
    for _ in range(40):
        beat()
        await asyncio.sleep(TICK_S)  # time: of a heartbeat
    pause()
    before = process.num_ticks
    await eventually(lambda: process.num_ticks > before + 30)
    assert not watching.done()
    beat()
    async with asyncio.timeout(10):
        assert (await watching).startswith("hung: no sign of life for ")


def test_beats_are_never_waited_for_and_never_written_elsewhere(pipe, monkeypatch, tmp_path):
    for _ in range(1 << 16):
        beat()
    beat()
    with (tmp_path / "file").open("wb") as file:
        monkeypatch.setenv(heartbeat.VARIABLE, str(file.fileno()))
        beat()
    beat()  # to a descriptor that is closed
    assert not (tmp_path / "file").read_bytes()


def test_activity_of_a_process_is_what_it_does():
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        wait_until(lambda: activity(process.pid).cpu_s > 0.1)
        assert activity(process.pid).state == "R"
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: activity(process.pid).state == "T")
    finally:
        process.kill()
        process.wait()
    assert activity(process.pid) is None
