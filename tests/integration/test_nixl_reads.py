"""Real NIXL between two mover processes of this host, over UCX's tcp and over its shared-memory copy (CMA)."""

import asyncio
import gc
import hashlib
import os
import re
from pathlib import Path

import pytest

from medialane.transfer import StillWriting
from medialane.types.errors import TransferFailed
from nixl_hosts import MIB, Host, require_nixl
from waiting import eventually

pytestmark = [pytest.mark.whole, pytest.mark.timeout(60)]

NUM_BYTES = 19 * MIB
#: Measured: 0.005. Without the interval of the progress thread: 0.55 to 1.
MAX_IDLE_CORES = 0.02


@pytest.fixture
async def hosts(monkeypatch, capfd):
    """Starts hosts whose movers use these transports of UCX, and log which it chooses."""
    require_nixl()
    made = []

    async def start(transports):
        monkeypatch.setenv("UCX_TLS", transports)
        monkeypatch.setenv("UCX_PROTO_INFO", "y")
        made.extend(Host(size_bytes=64 * MIB) for _ in range(2))
        await asyncio.gather(*(host.mover.offer(wait=True) for host in made))
        return made

    yield start
    for host in made:
        await host.close()
    gc.collect()  # a traceback references frames, which reference views of the arena


def chosen(capfd) -> str:
    """What UCX has logged about the memory reads that it has planned."""
    return "".join(capfd.readouterr())


def payload(seed: int = 0) -> bytes:
    return hashlib.shake_128(bytes([seed])).digest(NUM_BYTES)


@pytest.mark.parametrize("transports", ["tcp", "all", "cma,self,sysv"])
async def test_entry_is_read_over_the_transport_that_ucx_is_given(hosts, capfd, transports):
    """Without tcp in UCX_TLS an agent cannot be created: the mover adds it."""
    owner, reader = await hosts(transports)
    data = payload()
    opened = await owner.opened(data)
    for _ in range(2):
        assert await reader.read(opened, deadline_s=30) == data
    found = chosen(capfd)
    assert re.search(r"\btcp/\w+", found), "UCX logs what it uses, over any device: hosts may be linked to this one"
    assert ("cma/memory" in found) == (transports != "tcp")


async def test_concurrent_reads_get_their_own_bytes(hosts):
    owner, reader = await hosts("tcp")
    parts = [payload(seed)[: 3 * MIB] for seed in range(6)]
    opened = [await owner.opened(part) for part in parts]
    assert await asyncio.gather(*(reader.read(found, deadline_s=30) for found in opened)) == parts


async def test_entry_that_was_freed_is_detected(hosts):
    owner, reader = await hosts("tcp")
    opened = await owner.opened(payload())
    owner.free_last()
    with pytest.raises(TransferFailed, match="not the one that was handed out"):
        await reader.read(opened, deadline_s=30)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_idle_agents_cost_less_than_a_fiftieth_of_a_core(hosts):
    owner, reader = await hosts("tcp")
    opened = await owner.opened(payload())
    await reader.read(opened, deadline_s=30)
    pids = [owner.mover.pid, reader.mover.pid]
    before = [cpu_s(pid) for pid in pids]
    await asyncio.sleep(3)  # time: over which the CPU time of idle processes is measured
    used = [(cpu_s(pid) - start) / 3 for pid, start in zip(pids, before, strict=True)]
    assert max(used) < MAX_IDLE_CORES, used


async def test_owner_killed_before_a_read_and_restarted(hosts):
    owner, reader = await hosts("tcp")
    data = payload()
    opened = await owner.opened(data)
    assert await reader.read(opened, deadline_s=30) == data
    owner.kill()
    await eventually(lambda: owner.mover.pid is None)
    with pytest.raises(TransferFailed) as raised:
        await reader.read(opened, deadline_s=30)
    assert not isinstance(raised.value, StillWriting)
    await eventually(lambda: owner.mover.offer(wait=True))
    assert await reader.read(await owner.opened(data), deadline_s=30) == data
    assert reader.mover.pid, "the reader's process has survived"


async def test_late_bytes_of_a_stopped_owner_do_not_reach_a_reused_range(hosts):
    """The read is given up, its range stays in quarantine until the bytes have arrived, and a range that is used in the
    meantime is another one."""
    owner, reader = await hosts("tcp")
    data = payload()
    opened = await owner.opened(data)
    await reader.read(opened, deadline_s=30)
    destination = reader.destination(NUM_BYTES)
    owner.stop()
    with pytest.raises(StillWriting) as raised:
        await reader.mover.read(opened, destination, deadline_s=1)
    assert not raised.value.ended.done()
    other = reader.destination(NUM_BYTES)
    other.payload[:] = canary = payload(1)
    owner.resume()
    await asyncio.wait_for(raised.value.ended, 20)
    assert destination.payload == data, "they have arrived late"
    assert other.payload == canary


async def test_garbage_as_metadata_fails_the_read_and_nothing_else(hosts):
    owner, reader = await hosts("tcp")
    data = payload()
    opened = await owner.opened(data)
    opened.offers["nixl"] = opened.offers["nixl"].replace(b"nixlSer", b"garbage")
    with pytest.raises(TransferFailed):
        await reader.read(opened, deadline_s=30)
    assert await reader.read(await owner.opened(data), deadline_s=30) == data
