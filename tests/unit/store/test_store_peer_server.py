"""The peer port: connections that are not stores are bounded in number, time and memory, and exclude no store."""

import asyncio
import os
import resource
import threading
import time
from contextlib import suppress

import pytest
import trustme
from peer_world import Host, greeting

from certificates import tls_settings
from handshakes import PROOF_BYTES
from medialane.transfer import peer_server
from medialane.wire import RpcConfig
from waiting import eventually

SECRET = "a secret for these tests alone"
OTHER_SECRET = "another secret of enough bytes"
#: Of hostile peers; stores connect from 127.0.0.1.
HOSTILE = ("127.0.0.2", 0)
NUM_HOSTILE = 1000
TIMEOUT_S = 2.5


#: What hostile peers send at once. Peers that send nothing, or too little, stay until they are aborted.
GARBAGE = [
    b"",
    os.urandom(200),
    b"GET / HTTP/1.1\r\nHost: store\r\n\r\n",
    b"\xff\xff\xff\xff" + bytes(1 << 16),
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    greeting(OTHER_SECRET)[:7],
    greeting(OTHER_SECRET),
    greeting(OTHER_SECRET) + os.urandom(PROOF_BYTES),
]


@pytest.fixture(params=["plain", "TLS"])
def config(request, tmp_path):
    files = tls_settings(tmp_path, trustme.CA()) if request.param == "TLS" else {}
    return RpcConfig(shared_secret=SECRET, handshake_timeout_s=TIMEOUT_S, **files)


@pytest.fixture
async def source(config):
    host = Host(config)
    await host.serve()
    yield host
    await host.close()


class Flood:
    """Hostile connections, each of which sends garbage, and then a byte now and then."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []

    async def add(self, garbage: bytes) -> None:
        with suppress(ConnectionError):
            _, writer = await asyncio.open_connection("127.0.0.1", self._port, local_addr=HOSTILE)
            self._writers.append(writer)
            writer.write(garbage)
        for slow in self._writers[:-20:20]:
            if not slow.is_closing():
                slow.write(b"\xff")

    def close(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


async def pulled(source, config, key: str) -> None:
    """Copy a new entry to a new host, over a new connection."""
    destination = Host(config)
    with source.store(key) as stored:
        (pin,) = await destination.pulls.pull([source.grant(stored)])
        assert destination.payload(pin) == source.payload(stored)
        pin.release()
    source.arena.evict(key)
    await destination.close()


def usage() -> tuple[int, int]:
    """Open files and threads of this process."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


@pytest.mark.timeout(60)
async def test_thousand_hostile_connections_are_bounded_and_exclude_no_store(source, config):
    await pulled(source, config, "before")
    files, threads = usage()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    flood = Flood(int(source.address.rpartition(":")[2]))
    for number in range(NUM_HOSTILE):
        await flood.add(GARBAGE[number % len(GARBAGE)])
        if number % 100 == 99:
            await pulled(source, config, f"{number}")
    assert usage()[1] == threads
    flood.close()
    await eventually(lambda: usage()[0] <= files + 4)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 64 * 1024  # KiB


async def test_peer_that_sends_a_byte_at_a_time_is_cut_at_its_deadline(source):
    started = time.monotonic()
    port = int(source.address.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(10):
        with suppress(ConnectionError):
            for byte in greeting(OTHER_SECRET):
                writer.write(bytes([byte]))
                with suppress(TimeoutError):
                    async with asyncio.timeout(TIMEOUT_S / 4):  # time: a slow peer
                        if not await reader.read(4096) and reader.at_eof():
                            break
    assert time.monotonic() - started < 8
    await eventually(lambda: source.pulls.num_connections == 0)
    writer.transport.abort()


async def test_oldest_idle_connection_is_closed_for_a_new_one(source, config, monkeypatch):
    monkeypatch.setattr(peer_server, "MAX_CONNECTIONS", 3)
    made = [Host(config) for _ in range(5)]
    for number, destination in enumerate([*made, *made]):
        with source.store(f"k{number}") as stored:
            (await destination.pulls.pull([source.grant(stored)]))[0].release()
        await eventually(lambda: source.pulls.num_connections <= 3)
    for destination in made:
        await destination.close()
