"""NIXL between two "hosts" (network namespaces): reads, and faults of the other host and of the link."""

import asyncio
import gc
import hashlib
import importlib.util
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from medialane.transfer import StillWriting
from medialane.types.errors import TransferFailed
from nixl_hosts import MIB, Host, require_nixl
from waiting import eventually, iterations

pytestmark = [pytest.mark.whole, pytest.mark.timeout(90)]

NAMESPACES = Path(__file__).parents[2] / "benchmarks" / "namespaces.py"
NUM_BYTES = 19 * MIB
DATA = hashlib.shake_128(b"data").digest(NUM_BYTES)
CANARY = hashlib.shake_128(b"canary").digest(NUM_BYTES)
SHORT_S = 1.0


@pytest.fixture
def network():
    """As root; elsewhere these tests are skipped."""
    spec = importlib.util.spec_from_file_location("namespaces", NAMESPACES)
    namespaces = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(namespaces)
    with ExitStack() as stack:
        try:
            found = stack.enter_context(namespaces.two_hosts())
        except OSError as error:
            pytest.skip(f"NOT TESTED: NIXL between network namespaces, which cannot be created here: {error}")
        yield found


@pytest.fixture
async def hosts(monkeypatch, capfd, network, tmp_path):
    """An owner and a reader, one in each namespace. Their processes write to `capfd`."""
    require_nixl()
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_PROTO_INFO", "y")
    made = [Host(size_bytes=96 * MIB) for _ in range(2)]
    await asyncio.gather(*[await started_inside(network, tmp_path, index, host) for index, host in enumerate(made)])
    yield made
    for host in made:
        await host.close()
    gc.collect()  # a traceback references frames, which reference views of the arena


async def started_inside(network, tmp_path, index, host):
    """Start the mover process of `host` in a namespace, where /sys is that of the namespace, too: UCX finds network
    devices there. Return what ends when it is ready."""
    script = tmp_path / f"python{index}"
    script.write_text(f'#!/bin/sh\nexec {" ".join(network.prefix(index))} {sys.executable} "$@"\n')
    script.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(script))
        starting = asyncio.ensure_future(host.mover.offer(wait=True))
        await iterations(3)
    return starting


async def connected(owner, reader):
    opened = await owner.opened(DATA)
    assert await reader.read(opened, deadline_s=30) == DATA
    return opened


async def stuck_read(reader, opened):
    """Start a read that does not proceed; return its destination and its task."""
    destination = reader.destination(NUM_BYTES)
    read = asyncio.ensure_future(reader.mover.read(opened, destination, deadline_s=30))
    await eventually(lambda: reader.mover.child and reader.mover.child.num_reads)
    return destination, read


async def given_up(reader, opened):
    destination = reader.destination(NUM_BYTES)
    with pytest.raises(StillWriting) as raised:
        await reader.mover.read(opened, destination, deadline_s=SHORT_S)
    return destination, raised.value.ended


async def test_reads_go_over_the_network_and_proceed_when_a_cut_link_is_back(hosts, network, capfd):
    owner, reader = hosts
    opened = await connected(owner, reader)
    log = "".join(capfd.readouterr())
    assert "tcp/veth" in log, "UCX logs what it uses"
    assert "cma" not in log
    network.set_link("down")
    destination, ended = await given_up(reader, opened)
    network.set_link("up")
    await asyncio.wait_for(ended, 60)
    assert destination.payload == DATA
    assert await reader.read(opened, deadline_s=30) == DATA


async def test_owner_killed_during_a_read(hosts):
    owner, reader = hosts
    opened = await connected(owner, reader)
    owner.stop()
    _, read = await stuck_read(reader, opened)
    owner.kill()
    with pytest.raises(TransferFailed) as raised:
        await asyncio.wait_for(read, 20)
    assert not isinstance(raised.value, StillWriting)
    assert reader.mover.pid, "the reader's process has survived"


async def test_owner_that_continues_after_the_deadline_does_not_write_to_a_reused_range(hosts):
    owner, reader = hosts
    opened = await connected(owner, reader)
    owner.stop()
    destination, ended = await given_up(reader, opened)
    reused = reader.destination(NUM_BYTES)  # the one that was given up is in quarantine
    reused.payload[:] = CANARY
    assert not ended.done()
    owner.resume()
    await asyncio.wait_for(ended, 30)
    assert destination.payload == DATA, "the bytes have arrived late"
    assert reused.payload == CANARY


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
async def test_reads_and_quarantine_end_with_the_mover_process(hosts, network, tmp_path, number):
    owner, reader = hosts
    opened = await connected(owner, reader)
    owner.stop()
    first, ended = await given_up(reader, opened)
    second, read = await stuck_read(reader, opened)
    os.kill(reader.mover.pid, number)
    with pytest.raises(TransferFailed, match="has exited"):
        await asyncio.wait_for(read, 10)
    await asyncio.wait_for(ended, 1)
    first.payload[:] = second.payload[:] = CANARY
    owner.resume()
    await (await started_inside(network, tmp_path, 1, reader))
    if owner.mover.pid is None:  # UCX may abort a process whose peer has exited in the middle of a read
        await (await started_inside(network, tmp_path, 0, owner))
    assert await reader.read(await owner.opened(DATA), deadline_s=30) == DATA
    assert first.payload == second.payload == CANARY, "nothing has arrived late"
