"""A whole process under a service manager: it says when it is ready, reads its settings again and stops."""

import asyncio
import os
import signal
import socket
import sys

import pytest

from waiting import eventually

START_S = 60


@pytest.fixture
def manager(tmp_path):
    """systemd's end of the socket, which collects lines."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(f"{tmp_path}/notify")
        end.setblocking(False)
        lines = []

        def read():
            while True:
                try:
                    lines.extend(end.recv(4096).decode().split("\n"))
                except BlockingIOError:
                    return lines

        yield read


@pytest.mark.timeout(120)
async def test_worker_reports_start_reload_life_and_stop(manager, tmp_path):
    settings, address = tmp_path / "settings.toml", f"unix:{tmp_path}/w.sock"
    settings.write_text("worker-ping-interval = 2")
    words = ("worker", "m", "--engine", "simulated", "--listen", address, "--config", str(settings))
    environ = {**os.environ, "NOTIFY_SOCKET": f"{tmp_path}/notify", "WATCHDOG_USEC": "200000"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "medialane", *words),
        env=environ,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # without a terminal, whose end SIGHUP would mean
    )
    try:
        await eventually(lambda: "READY=1" in manager(), "it is ready", START_S)
        await eventually(lambda: manager().count("WATCHDOG=1") >= 2, "it lives", 20)
        settings.write_text('log-level = "debug"\nworker-ping-interval = 3')
        before = manager().count("READY=1")
        process.send_signal(signal.SIGHUP)
        await eventually(lambda: manager().count("READY=1") > before, "it has read them again", 20)
        assert "RELOADING=1" in manager()
        process.send_signal(signal.SIGTERM)
        _, log = await asyncio.wait_for(process.communicate(), 30)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0
    assert "STOPPING=1" in manager()
    assert "settings were read again: changed: --log-level" in log.decode()
