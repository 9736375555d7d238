"""The store, a gateway, a worker and the fork server hang at the same time, stopped or with a blocked event loop: media
are back within seconds, other streams go on, and those of the gateway end."""

import asyncio
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import msgspec
import pytest
from gates import GATES
from gateway_parts import png
from host_processes import Host, started_host, stop_host, wait_for_host
from host_program import GATEWAYS, NUM_TOKENS, WORKERS, address
from process_tree import parent_of

from host_state import store_link
from http_origin import HttpOrigin
from medialane.runtime.phase import ProcessExits
from waiting import eventually

#: Until media are back: 10 s of silence, the last beat before it, the next look, and the restart of a process.
BACK_S = 20


@pytest.fixture
async def host():
    folder = Path(tempfile.mkdtemp(prefix="ml-host-", dir="/dev/shm"))
    process = started_host(folder)
    try:
        await asyncio.to_thread(wait_for_host, process, folder)
        async with store_link(address(folder, "store"), folder) as link, HttpOrigin() as origin:
            host = Host(process.pid, folder, link, origin)
            yield host
            for gate in GATES:
                host.gates.open(gate)
    finally:
        await asyncio.to_thread(stop_host, process, folder)
        shutil.rmtree(folder)


async def answered(host, gateway, data, within_s):
    """Ask until there is an answer; return it, and after how many seconds."""
    began = time.monotonic()
    while True:
        answer = await host.ask(gateway, data=data)
        if isinstance(answer, list):
            return answer
        assert time.monotonic() - began < within_s, answer
        await asyncio.sleep(0.2)  # time: a client that tries again


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGRTMIN], ids=["stopped", "blocked"])
async def test_processes_that_hang_are_replaced_and_cost_only_their_own_requests(host, number):
    image, other = png(300, 200, 0), png(300, 200, 1)
    right = [await host.ask(gateway, data=image) for gateway in range(len(GATEWAYS))]
    assert list(map(len, right)) == [NUM_TOKENS] * len(right)
    host.gates.close("mid-stream")
    streams = [asyncio.create_task(host.ask(gateway, data=image)) for gateway in range(len(GATEWAYS))]
    await eventually(lambda: len(host.gates.arrived()) == len(streams), "both are in the middle of their answers")
    busy = set(host.gates.arrived())
    idle = [name for name in WORKERS if host.pid_of(name) not in busy]
    names = ["store", GATEWAYS[0], *idle]
    before = {name: host.pid_of(name) for name in (*names, GATEWAYS[1])}
    for pid in [parent_of(host.preparer()), *(before[name] for name in names)]:
        os.kill(pid, number)
    began = time.monotonic()
    assert await streams[0] == "connection lost"
    cut_s = time.monotonic() - began
    host.gates.open("mid-stream")
    assert await streams[1] == right[1]
    assert await answered(host, 1, other, BACK_S)
    media_s = time.monotonic() - began
    assert max(cut_s, media_s) < BACK_S
    assert await answered(host, 0, image, BACK_S) == right[0]
    await eventually(lambda: all(host.pid_of(name) != before[name] for name in names), "all are replaced")
    assert host.pid_of(GATEWAYS[1]) == before[GATEWAYS[1]]
    exits = msgspec.json.decode((host.folder / "exits.json").read_bytes(), type=dict[str, ProcessExits])
    assert {name: each.num_hung for name, each in exits.items()} == dict.fromkeys(names, 1)
