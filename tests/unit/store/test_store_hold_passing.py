"""Holds that a gateway passes to a worker with a request, over a real store."""

from __future__ import annotations

import asyncio

import pytest
from store_world import ITEM_BYTES, pattern, wanted, write

from medialane.store import HoldPasser, StoreEntries, StoreLink
from medialane.types.errors import HandoverFailed, StoreUnavailable
from medialane.types.tensor import TensorSpec
from waiting import eventually


@pytest.fixture
async def gateway(world):
    client = await world.client()
    client.passer = HoldPasser(client.link, retention_s=0.0)
    yield client
    await client.exit()


class Worker:
    """A client whose calls are counted."""

    def __init__(self, client) -> None:
        self.client = client
        self.link = client.link
        self.num_calls = 0
        self.entries = StoreEntries(client.link)
        self._call = client.link.call
        client.link.call = self._counted

    async def _counted(self, *args, **settings):
        self.num_calls += 1
        return await self._call(*args, **settings)


@pytest.fixture
async def worker(world):
    client = await world.client()
    yield Worker(client)
    await client.exit()


async def found(gateway, content="a"):
    hold_id = await gateway.find(content)
    return hold_id, gateway.holds[hold_id][1]


def num_leases(world):
    return world.arena.stats().num_leases


@pytest.mark.parametrize("is_early", [True, False])
async def test_passed_hold_needs_no_call_and_outlives_its_gateway(world, gateway, worker, is_early):
    _, entry = await found(gateway)
    waiting = None if is_early else asyncio.create_task(worker.entries.hold([entry], passed_with="r"))
    await asyncio.sleep(0)
    assert gateway.passer.pass_on([entry], to=worker.link.client_id, request_id="r")
    await eventually(lambda: num_leases(world) == 2)
    held = await (waiting or worker.entries.hold([entry], passed_with="r"))
    await gateway.exit()
    await eventually(lambda: num_leases(world) == 1)
    world.arena.clear()
    assert worker.num_calls == 0
    assert world.bytes_of(entry) == pattern("a") * ITEM_BYTES
    held.release()
    await eventually(lambda: num_leases(world) == 0)


async def test_entries_that_were_not_passed_are_asked_for(world, gateway, worker):
    (_, passed), (_, other) = await found(gateway), await found(gateway, "b")
    gateway.passer.pass_on([passed], to=worker.link.client_id, request_id="r")
    held = await worker.entries.hold([passed, other], passed_with="r")
    assert (worker.num_calls, num_leases(world)) == (1, 4)
    held.release()
    await eventually(lambda: num_leases(world) == 2)


async def test_hold_that_no_request_comes_for_ends(world, gateway, worker):
    _, entry = await found(gateway)
    gateway.passer.pass_on([entry], to=worker.link.client_id, request_id="r")
    await eventually(lambda: num_leases(world) == 2)
    await eventually(lambda: num_leases(world) == 1)


async def test_worker_asks_if_no_hold_arrives(gateway, worker):
    _, entry = await found(gateway)
    assert gateway.passer.pass_on([entry], to="not connected", request_id="r")
    (await worker.entries.hold([entry], passed_with="r")).release()
    assert worker.num_calls == 1


async def test_hold_that_arrives_too_late_ends(world, gateway, worker):
    _, entry = await found(gateway)
    held = await worker.entries.hold([entry], passed_with="r")
    gateway.passer.pass_on([entry], to=worker.link.client_id, request_id="r")
    await eventually(lambda: num_leases(world) == 3)
    await eventually(lambda: num_leases(world) == 2)
    held.release()


async def test_entry_that_is_no_longer_held_is_not_passed(world, gateway, worker):
    hold_id, entry = await found(gateway)
    gateway.release(hold_id)
    await eventually(lambda: num_leases(world) == 0)
    gateway.passer.pass_on([entry], to=worker.link.client_id, request_id="r")
    with pytest.raises(HandoverFailed):
        await worker.entries.hold([entry], passed_with="r")


class WatchedLink(StoreLink):
    """Calls `on_passed` when holds have arrived."""

    on_passed = staticmethod(lambda: None)

    def watch_passed(self, listener):
        super().watch_passed(lambda passed: (listener(passed), self.on_passed()))


async def test_request_that_is_cancelled_as_its_holds_arrive_leaves_none(world, gateway):
    _, entry = await found(gateway)
    worker = await world.client(link=WatchedLink)
    waiting = asyncio.create_task(worker.entries.hold([entry], passed_with="r"))
    worker.link.on_passed = waiting.cancel
    await asyncio.sleep(0)
    gateway.passer.pass_on([entry], to=worker.link.client_id, request_id="r")
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    await eventually(lambda: num_leases(world) == 1)


async def test_removed_arena_ends_the_wait_at_once(world, gateway, worker):
    _, entry = await found(gateway)
    entries = StoreEntries(worker.link, max_wait_s=60)
    waiting = asyncio.create_task(entries.hold([entry], passed_with="r"))
    await asyncio.sleep(0)
    await world.close()
    with pytest.raises(StoreUnavailable):
        await asyncio.wait_for(waiting, 5)
    with pytest.raises(StoreUnavailable):
        await entries.hold([entry], passed_with="later")


async def test_connection_lost_after_the_pass_leaves_no_hold(world, gateway, worker):
    _, entry = await found(gateway)
    gateway.passer.pass_on([entry], to=worker.link.client_id, request_id="r")
    await eventually(lambda: num_leases(world) == 2)
    await worker.client.lose_connection()
    await eventually(lambda: num_leases(world) == 1)


async def test_client_that_takes_no_holds_releases_them(world, gateway):
    other = await world.client()
    _, entry = await found(gateway)
    gateway.passer.pass_on([entry], to=other.link.client_id, request_id="r")
    (await StoreEntries(gateway.link).hold([entry])).release()  # the store has handled the message before
    await eventually(lambda: num_leases(world) == 1)
    await other.exit()


async def test_what_a_worker_retains_is_not_passed_again(gateway, worker):
    _, entry = await found(gateway)
    passer = HoldPasser(gateway.link, retention_s=60)
    to = worker.link.client_id
    assert passer.pass_on([entry], to=to, request_id="1")
    assert not passer.pass_on([entry], to=to, request_id="2")
    assert passer.pass_on([entry], to="another", request_id="3")
    assert not passer.pass_on([entry], to="", request_id="4"), "a worker without a store"


async def test_nothing_is_passed_without_a_store(world, gateway, worker):
    _, entry = await found(gateway)
    await world.server.close()
    await eventually(lambda: gateway.link.status is None)
    assert not gateway.passer.pass_on([entry], to=worker.link.client_id, request_id="r")


async def passed_embedding(gateway, worker, content, entries=()):
    """What a worker finds of the embedding that was passed with a request, and the request's hold."""
    gateway.passer.pass_on(entries, to=worker.link.client_id, request_id="r", wanted=[wanted(content)])
    held = await worker.entries.hold(entries, passed_with="r")
    return await worker.entries.embedding(wanted(content), wait_s=0, passed_with="r"), held


async def test_embedding_is_written_and_read_without_a_call(world, gateway, worker):
    _, entry = await found(gateway)
    fill, held = await passed_embedding(gateway, worker, "e", [entry])
    assert not fill.is_filled
    write(fill, "e")
    held.release()
    fill.hold.release()
    await eventually(lambda: world.arena.contains("e" * 64, "embedded"))
    again, held = await passed_embedding(gateway, worker, "e", [entry])
    assert again.is_filled
    assert worker.num_calls == 0
    held.release()
    again.hold.release()
    await eventually(lambda: num_leases(world) == 1)


async def test_embedding_that_is_passed_and_not_asked_for_ends_with_the_request(world, gateway, worker):
    _, entry = await found(gateway)
    gateway.passer.pass_on([entry], to=worker.link.client_id, request_id="r", wanted=[wanted("e")])
    held = await worker.entries.hold([entry], passed_with="r")
    assert world.arena.stats().num_reservations == 1
    held.release()
    await eventually(lambda: world.arena.stats().num_reservations == 0)


async def test_embedding_that_no_request_comes_for_is_freed(world, gateway, worker):
    _, entry = await found(gateway)
    gateway.passer.pass_on([entry], to=worker.link.client_id, request_id="r", wanted=[wanted("e")])
    await eventually(lambda: world.arena.stats().num_reservations == 1)
    await eventually(lambda: world.arena.stats().num_reservations == 0)


async def test_embedding_that_another_worker_writes_is_not_passed_but_asked_for(world, gateway, worker):
    other = await world.client()
    fill = await other.embedding("e")
    _, entry = await found(gateway)
    waiting = asyncio.create_task(passed_embedding(gateway, worker, "e", [entry]))
    await asyncio.wait_for(waiting, 5)
    assert waiting.result()[0] is None
    assert worker.num_calls == 1
    waiting.result()[1].release()
    fill.hold.release()
    await other.exit()


async def test_embedding_of_an_entry_that_is_retained_is_passed(gateway, worker):
    _, entry = await found(gateway)
    passer, to = HoldPasser(gateway.link, retention_s=60), worker.link.client_id
    assert passer.pass_on([entry], to=to, request_id="1")
    assert passer.pass_on([entry], to=to, request_id="2", wanted=[wanted("e")])
    assert not passer.pass_on([], to=to, request_id="3", wanted=[wanted("e")]), "nothing of the request is in the arena"


async def test_holds_are_passed_although_there_is_no_memory_for_an_embedding(world, gateway, worker):
    _, entry = await found(gateway)
    large = wanted("e", TensorSpec("uint8", (world.arena.max_payload_bytes,)))
    assert gateway.passer.pass_on([entry], to=worker.link.client_id, request_id="r", wanted=[large])
    held = await worker.entries.hold([entry], passed_with="r")
    assert worker.num_calls == 0
    held.release()
