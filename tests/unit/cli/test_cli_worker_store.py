"""A worker keeps a store running on its host."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path

import pytest
from own_process import run_command

from medialane.cli import worker_command
from medialane.config import Config
from medialane.wire import has_listener
from waiting import eventually

#: Listens at the address, records its pid, and takes a second process's place only when that has ended.
_STORE = """
import os, socket, sys
path = sys.argv[1]
if os.path.exists(path):
    os.unlink(path)
listener = socket.socket(socket.AF_UNIX)
listener.bind(path)
listener.listen()
with open(path + ".pids", "a") as pids:
    print(os.getpid(), file=pids)
while True:
    listener.accept()[0].close()
"""


@pytest.fixture
def address():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield f"unix:{folder}/store.sock"


def host_store(address: str, listens_at: str = ""):
    argv = [sys.executable, "-c", _STORE, (listens_at or address).removeprefix("unix:")]
    return worker_command.host_store(argv, Config(), "model", address, check_s=0.05)


def pids(address: str) -> list[int]:
    path = Path(address.removeprefix("unix:") + ".pids")
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_store_is_started_restarted_and_stopped_with_the_worker(address):
    async with host_store(address):
        await eventually(lambda: has_listener(address.removeprefix("unix:")))
        (first,) = pids(address)
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: len(pids(address)) == 2 and has_listener(address.removeprefix("unix:")))
    await eventually(lambda: not any(map(is_alive, pids(address))))


async def test_one_of_several_workers_starts_the_store_and_another_takes_over(address):
    first, second = (host_store(address) for _ in range(2))
    async with second:
        async with first:
            await eventually(lambda: has_listener(address.removeprefix("unix:")))
            await eventually(lambda: len(pids(address)) == 1)
            (pid,) = pids(address)
            os.kill(pid, signal.SIGKILL)
            await eventually(lambda: len(pids(address)) == 2 and has_listener(address.removeprefix("unix:")))
        await eventually(lambda: is_alive(pids(address)[-1]) and has_listener(address.removeprefix("unix:")))
    assert 2 <= len(pids(address)) <= 3
    await eventually(lambda: not any(map(is_alive, pids(address))))


async def test_workers_that_start_together_start_one_store(address, caplog):
    async with (
        host_store(address),
        host_store(address),
    ):
        await eventually(lambda: has_listener(address.removeprefix("unix:")))
        (first,) = pids(address)
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: len(pids(address)) == 2 and has_listener(address.removeprefix("unix:")))
    assert [record.message for record in caplog.records if "ended" in record.message] == [
        "the store of this host has ended: killed by SIGKILL"
    ]
    await eventually(lambda: not any(map(is_alive, pids(address))))


async def test_store_that_cannot_be_started_is_tried_again(address, caplog):
    folder = Path(address.removeprefix("unix:")).parent / "later"
    later = f"unix:{folder}/store.sock"
    async with host_store(later, address):
        await eventually(lambda: "cannot be started: No such file or directory" in caplog.text)
        folder.mkdir()
        await eventually(lambda: pids(address))


async def test_store_that_runs_already_is_used(address):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address.removeprefix("unix:"))
        listener.listen()
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        async with (
            host_store(address),
            host_store(address),
        ):
            for _ in range(3):
                (await loop.sock_accept(listener))[0].close()
    assert pids(address) == []


def test_store_to_start_needs_an_address(capsys):
    assert run_command("worker", "model", "--listen", "unix:/tmp/w.sock", "--start-store") == 2
    assert "--start-store needs --store" in capsys.readouterr().err


def test_embeddings_that_must_be_kept_need_a_store(capsys):
    assert run_command("worker", "model", "--listen", "unix:/tmp/w.sock", "--encode-cache", "on") == 2
    assert "--encode-cache on needs --store" in capsys.readouterr().err


def test_command_line_is_one_of_a_store_without_a_processor():
    words = worker_command.store_command("model", "unix:/s.sock")
    own = words[words.index("medialane") + 1 :]
    assert own == ["store", "model", "--listen", "unix:/s.sock", "--stage", "url", "--preparers", "1"]
