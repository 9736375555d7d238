"""Reports to systemd arrive at its socket, and cost nothing without one."""

import asyncio
import os
import socket
import time

import pytest

from medialane.runtime.phase import READY, enter_phase, show_ready, show_status, shown_reload, watched
from medialane.runtime.stop import Stop
from waiting import eventually


class Manager:
    """systemd's end."""

    def __init__(self, address):
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._socket.setblocking(False)
        self.lines = []

    def read(self):
        """All lines so far."""
        while True:
            try:
                self.lines += self._socket.recv(4096).decode().split("\n")
            except BlockingIOError:
                return self.lines

    def close(self):
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def manager(request, tmp_path, monkeypatch):
    name = f"{tmp_path}/notify" if request.param == "path" else f"\0medialane-{os.getpid()}"
    manager = Manager(name)
    monkeypatch.setenv("NOTIFY_SOCKET", name.replace("\0", "@"))
    yield manager
    manager.close()


def test_phases_are_the_status_until_the_process_is_ready(manager):
    enter_phase("loading\nweights")
    enter_phase(READY)
    assert manager.read() == ["STATUS=loading weights", "READY=1", "STATUS=ready"]


def test_first_request_to_stop_is_reported(manager):
    stop = Stop()
    stop.ask()
    stop.ask()
    assert manager.read().count("STOPPING=1") == 1


def test_reload_is_reported_with_its_time_and_its_end_even_if_it_fails(manager):
    before = time.monotonic_ns() // 1000
    with pytest.raises(ValueError, match="bad file"), shown_reload():
        raise ValueError("bad file")
    first, when, last = manager.read()
    assert (first, last) == ("RELOADING=1", "READY=1")
    assert before <= int(when.removeprefix("MONOTONIC_USEC=")) <= time.monotonic_ns() // 1000


async def test_watchdog_gets_signs_of_life_while_the_loop_runs(manager, monkeypatch):
    monkeypatch.setenv("WATCHDOG_USEC", "20000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    async with watched(lambda: "2 of 2 workers"):
        await eventually(lambda: manager.read().count("WATCHDOG=1") >= 3)
    assert manager.read().count("STATUS=2 of 2 workers") == 1
    before = manager.read().count("WATCHDOG=1")
    await asyncio.sleep(0.05)  # time: of several signs
    assert manager.read().count("WATCHDOG=1") == before


async def test_watchdog_of_another_process_gets_none(manager, monkeypatch):
    monkeypatch.setenv("WATCHDOG_USEC", "20000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid() + 1))
    async with watched(lambda: "serving"):
        await eventually(lambda: "STATUS=serving" in manager.read())
    assert "WATCHDOG=1" not in manager.read()


async def test_reports_that_nobody_reads_raise_no_error(tmp_path, monkeypatch):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    show_ready("serving")
    async with watched(lambda: "serving"):
        monkeypatch.setenv("NOTIFY_SOCKET", f"{tmp_path}/gone")
        show_status("serving")
