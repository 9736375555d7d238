"""Pulls between processes: a source that is killed or stopped, and two hosts in network namespaces."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import pytest
from pulling_program import PULL_S, SECRET, Pulled, Stored

from medialane.arena import ENTRY_HEADER_BYTES, Arena, ArenaConfig
from medialane.transfer import Pulls
from medialane.transfer.peer_connection import PeerConnection
from medialane.types.errors import TransferFailed
from medialane.wire import RpcConfig
from waiting import eventually, line_of, wait_until

pytestmark = pytest.mark.timeout(90)  # processes are started

PROGRAM = str(Path(__file__).with_name("pulling_program.py"))
NAMESPACES = Path(__file__).parents[2] / "benchmarks" / "namespaces.py"
MIB = 1 << 20


class Host:
    """A process of `pulling_program`, in a namespace if there is a `prefix`."""

    def __init__(self, *arguments: str, prefix: list[str] = ()) -> None:
        self._folder = tempfile.TemporaryDirectory(dir="/dev/shm", prefix="host-")
        self.process = subprocess.Popen(
            [*prefix, sys.executable, PROGRAM, self._folder.name, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            self.stored = self.read(Stored) if arguments else None
        except BaseException:  # its owner does not have it yet
            self.close()
            raise

    def read(self, kind):
        return msgspec.json.decode(line_of(self.process), type=kind)

    def pull(self, stored: Stored) -> Pulled:
        self.ask(stored)
        return self.read(Pulled)

    def ask(self, stored: Stored) -> None:
        self.process.stdin.write(msgspec.json.encode(stored.entry) + b"\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()  # also if it is stopped
        self.process.communicate(timeout=30)
        self._folder.cleanup()


@pytest.fixture
def source():
    host = Host("127.0.0.1", str(20 * MIB))
    yield host
    host.close()


@pytest.fixture
async def destination():
    """The pulls of this process's arena, with a short deadline."""
    arena = Arena.create(ArenaConfig(size_bytes=32 * MIB))
    pulls = Pulls(arena, RpcConfig(shared_secret=SECRET), max_pull_s=lambda _: PULL_S)
    pulls.arena = arena
    yield pulls
    await pulls.close()
    assert (arena.stats().num_leases, arena.stats().num_reservations) == (0, 0)
    arena.close()


class Gate(asyncio.Event):
    """Payloads are received when it is set: until then the source fills the sockets' buffers, and waits."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = asyncio.Event()


@pytest.fixture
async def gate(monkeypatch):
    gate, receive = Gate(), PeerConnection.receive_into

    async def receive_into(self, payload):
        if len(payload) > MIB:
            gate.reached.set()
            await gate.wait()
        await receive(self, payload)

    monkeypatch.setattr(PeerConnection, "receive_into", receive_into)
    yield gate
    gate.set()


async def pulling(destination, entry, gate):
    """Start a pull; return when the source has been asked for the payload."""
    task = asyncio.create_task(destination.pull([entry]))
    await eventually(gate.reached.is_set)
    return task


async def test_source_killed_during_a_pull_fails_it_at_once(source, destination, gate):
    task = await pulling(destination, source.stored.entry, gate)
    source.process.kill()
    source.process.wait()
    gate.set()
    with pytest.raises(TransferFailed, match=r"closed|lost"):
        await task


async def test_source_killed_before_a_pull_fails_it_and_its_successor_is_used(source, destination):
    source.process.kill()
    source.process.wait()
    with pytest.raises(TransferFailed, match="cannot be reached"):
        await destination.pull([source.stored.entry])
    successor = Host("127.0.0.1", "1000")
    (pin,) = await destination.pull([successor.stored.entry])
    pin.release()
    successor.close()


async def test_stopped_source_that_resumes_writes_nothing_to_the_range_that_is_reused(source, destination, gate):
    task = await pulling(destination, source.stored.entry, gate)
    source.process.send_signal(signal.SIGSTOP)
    gate.set()
    started = time.monotonic()
    with pytest.raises(TransferFailed, match="in time"):
        await task
    assert time.monotonic() - started < 4 * PULL_S
    with destination.arena.reserve(source.stored.entry.range.nbytes - ENTRY_HEADER_BYTES) as reused:
        reused.buffer[:] = canary = b"\xc5" * len(reused.buffer)
        source.process.send_signal(signal.SIGCONT)
        other = await asyncio.to_thread(source.pull, source.stored)  # it runs again; its own entry is at hand
        assert other.sha256 == source.stored.sha256
        assert reused.buffer == canary
    (pin,) = await destination.pull([source.stored.entry])
    pin.release()


@pytest.fixture
def two_hosts():
    """Two network namespaces with a link between them. As root; elsewhere these tests are skipped."""
    spec = importlib.util.spec_from_file_location("namespaces", NAMESPACES)
    namespaces = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(namespaces)
    made = namespaces.two_hosts()
    try:
        hosts = made.__enter__()
    except OSError as error:
        pytest.skip(f"NOT TESTED: two hosts in network namespaces, which cannot be created here: {error}")
    yield hosts
    made.__exit__(None, None, None)


def test_entry_is_copied_between_hosts_and_a_link_that_is_down_fails_in_time(two_hosts):
    source = Host(two_hosts.addresses[0], str(4 * MIB), prefix=two_hosts.prefix(0))
    destination = Host(prefix=two_hosts.prefix(1))
    try:
        assert destination.pull(source.stored).sha256 == source.stored.sha256
        two_hosts.set_link("down")
        started = time.monotonic()
        assert destination.pull(source.stored).error == "the other store did not respond in time"
        assert time.monotonic() - started < 4 * PULL_S
        two_hosts.set_link("up")  # the kernel may resend its packets only after a second or two
        wait_until(lambda: destination.pull(source.stored).sha256 == source.stored.sha256, "a pull over the link", 30)
    finally:
        source.close()
        destination.close()


def test_link_that_goes_down_in_the_middle_of_a_copy_fails_it_in_time_and_another_copy_succeeds(two_hosts):
    two_hosts.limit_rate("50mbit")  # so that the copy takes seconds
    source = Host(two_hosts.addresses[0], str(20 * MIB), prefix=two_hosts.prefix(0))
    destination = Host(prefix=two_hosts.prefix(1))
    try:
        destination.ask(source.stored)
        wait_until(lambda: two_hosts.num_sent_bytes() > MIB, "the copy has begun")
        two_hosts.set_link("down")
        assert destination.read(Pulled).error == "the other store did not respond in time"
        two_hosts.limit_rate("10gbit")
        two_hosts.set_link("up")
        wait_until(lambda: destination.pull(source.stored).sha256 == source.stored.sha256, "a pull over the link", 30)
    finally:
        source.close()
        destination.close()
