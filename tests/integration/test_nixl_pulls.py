"""Pulls between two stores whose movers are nixl (over a fake of it) and tcp."""

import asyncio
import gc
import logging
import os

import pytest
from msgspec.structs import replace

from medialane.arena import layout
from medialane.transfer import Pulls
from medialane.types.feature import Feature
from medialane.types.media import MediaSize
from medialane.types.tensor import TensorDescriptor, TensorSpec
from medialane.wire import RpcConfig
from nixl_hosts import FAKE, MIB, Host
from waiting import eventually

MISSING = "no_such_module:Agent"


class Store:
    """A host with the pulls of a store."""

    def __init__(self, factory: str, **settings) -> None:
        self.host = Host(factory=factory)
        self.pulls = Pulls(self.host.arena, RpcConfig(), self.host.mover, **settings)
        self._leases = []

    def granted(self, key: str, data: bytes, mover: str):
        """Cache an entry; return the right to copy it."""
        spec = TensorSpec("uint8", (len(data),))
        (offset,), size = layout((spec,))
        reservation = self.host.arena.reserve(size)
        reservation.buffer[:] = data
        tensors = (TensorDescriptor(spec, reservation.range, offset),)
        pin = self.host.arena.publish(reservation, key, Feature("image", key, b"", tensors, MediaSize()))
        self._leases.append(pin)
        return replace(self.pulls.grant([pin.range])[0], mover=mover)

    async def pull(self, entry) -> bytes:
        (pin,) = await self.pulls.pull([entry])
        with pin:
            return bytes(self.host.arena.view.tensor(pin.value.tensors[0]))

    @property
    def num_pulls(self) -> dict[str, int]:
        return dict(self.pulls.stats.num_pulls)

    async def close(self) -> None:
        if self.host.mover.pid is not None:
            self.host.resume()
        await self.pulls.close()
        for pin in self._leases:
            pin.release()
        await self.host.close()


@pytest.fixture
async def stores():
    """Starts a source and a destination with these agents."""
    made = []

    async def start(source=FAKE, destination=FAKE, **settings):
        made.extend([Store(source, **settings), Store(destination, **settings)])
        await made[0].pulls.serve("tcp://127.0.0.1:0")
        return made

    yield start
    for store in made:
        await store.close()
    gc.collect()  # a traceback references frames, which reference views of the arena


async def test_entry_is_pulled_by_the_chosen_mover(stores):
    source, destination = await stores()
    for mover in ("nixl", "tcp"):
        data = os.urandom(100_000)
        assert await destination.pull(source.granted(mover, data, mover)) == data
    assert destination.num_pulls == {"nixl": 1, "tcp": 1}


async def test_auto_uses_tcp_until_nixl_is_ready(stores):
    source, destination = await stores()
    data = os.urandom(2 * MIB)
    assert await destination.pull(source.granted("0", data, "auto")) == data
    assert destination.num_pulls == {"tcp": 1}, "a first pull does not wait for a process"
    await eventually(lambda: source.host.mover.pid and destination.host.mover.pid, "both start one")
    assert await destination.pull(source.granted("1", data, "auto")) == data
    assert destination.num_pulls == {"tcp": 1, "nixl": 1}


async def test_auto_uses_tcp_on_hosts_without_rdma_devices(stores):
    source, destination = await stores(prefers_mover=False)
    data = os.urandom(100_000)
    assert await destination.pull(source.granted("0", data, "nixl")) == data
    assert await destination.pull(source.granted("1", data, "auto")) == data
    assert destination.num_pulls == {"nixl": 1, "tcp": 1}


@pytest.mark.parametrize("agents", [(FAKE, MISSING), (MISSING, FAKE), (MISSING, MISSING)])
async def test_tcp_is_used_where_one_side_has_no_nixl(stores, caplog, agents):
    source, destination = await stores(*agents)
    with caplog.at_level(logging.INFO):
        for number in range(3):
            data = os.urandom(2 * MIB)
            assert await destination.pull(source.granted(f"{number}", data, "auto")) == data
            for store, agent in zip((source, destination), agents, strict=True):
                assert (await store.host.mover.offer(wait=True) is None) == (agent is MISSING)
    assert destination.num_pulls == {"tcp": 3}
    assert caplog.text.count("NIXL cannot be used on this host") == agents.count(MISSING), "one line per host"
    assert "failed" not in caplog.text


async def test_process_of_the_source_that_was_restarted_is_used_by_the_next_pull(stores):
    source, destination = await stores()
    assert await destination.pull(source.granted("0", b"a" * 1000, "nixl")) == b"a" * 1000
    source.host.kill()
    await eventually(lambda: source.host.mover.pid is None)
    await eventually(lambda: source.host.mover.offer(wait=True))
    assert await destination.pull(source.granted("1", b"b" * 1000, "nixl")) == b"b" * 1000


async def test_stopped_process_of_the_source_costs_a_deadline_and_its_range_is_quarantined(stores):
    deadlines = [30.0]
    source, destination = await stores(max_pull_s=lambda _: deadlines[-1])
    assert await destination.pull(source.granted("0", b"a" * 1000, "nixl")) == b"a" * 1000
    deadlines.append(1.0)
    source.host.stop()
    data = os.urandom(MIB)
    pull = asyncio.ensure_future(destination.pull(source.granted("1", data, "nixl")))
    await asyncio.wait([pull])
    assert "not ended in time" in str(pull.exception())
    assert destination.pulls.stats.num_quarantined == 1
    assert destination.host.arena.stats().num_reservations == 1, "it cannot be reused"
    source.host.resume()
    await eventually(lambda: destination.pulls.stats.num_quarantined == 0)
    assert destination.host.arena.stats().num_reservations == 0


async def test_mover_process_that_is_killed_in_the_middle_of_a_pull_costs_no_request(stores):
    """Of the destination, whose read is stuck: tcp copies the entry, to another range."""
    source, destination = await stores()
    assert await destination.pull(source.granted("0", b"a" * 1000, "nixl")) == b"a" * 1000
    source.host.stop()
    data = os.urandom(2 * MIB)
    pull = asyncio.ensure_future(destination.pull(source.granted("1", data, "auto")))
    await eventually(lambda: destination.host.mover.child and destination.host.mover.child.num_reads)
    destination.host.kill()
    assert await pull == data
    assert destination.num_pulls == {"nixl": 1, "tcp": 1}
    stats = destination.host.arena.stats()
    assert (destination.pulls.stats.num_quarantined, stats.num_reservations) == (0, 0)
