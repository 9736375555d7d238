"""The store and its clients over a real socket: holds, uploads, lost connections, exits."""

from __future__ import annotations

import asyncio
import logging
import os
import stat

import msgspec
import pytest
from store_world import ITEM_BYTES, RPC, Client, World, pattern, reference

from medialane.observability import request_id
from medialane.runtime.tasks import TAKER
from medialane.store import AskLease, FindItem, HeldEntry, ItemFound, StoreClient, StoreEntries, StoreHello
from medialane.store.messages import decode_from_store, decode_to_store
from medialane.types.errors import (
    ArenaFull,
    HandoverFailed,
    MedialaneError,
    ProtocolViolation,
    StartupFailed,
    StoreUnavailable,
)
from waiting import eventually


async def test_item_stays_in_place_while_it_is_held(world):
    gateway = await world.client()
    hold_id = await gateway.find("a")
    _, entry = gateway.holds[hold_id]
    for _ in range(100):  # many times the arena's size
        gateway.release(await gateway.find(chr(98 + _ % 20)))
        world.arena.clear()
    assert world.bytes_of(entry) == pattern("a") * ITEM_BYTES
    gateway.release(hold_id)
    await eventually(lambda: world.arena.stats().num_leases == 0)


async def test_second_gateway_hits_what_the_first_has_brought_in(world):
    one, other = await world.client(), await world.client()
    (first, second) = (await one.find("a"), await other.find("a"))
    assert one.holds[first][1] == other.holds[second][1]
    assert world.arena.stats().num_entries == 1


async def test_worker_holds_what_the_gateway_has_sent_beyond_the_gateways_death(world):
    gateway, worker = await world.client(), await world.client()
    hold_id = await gateway.find("a")
    _, entry = gateway.holds[hold_id]
    held = await StoreEntries(worker.link).hold([entry])
    await gateway.exit()
    world.arena.clear()
    assert world.bytes_of(entry) == pattern("a") * ITEM_BYTES
    held.release()
    await eventually(lambda: world.arena.stats().num_leases == 0)


async def test_worker_cannot_hold_what_its_gateway_has_released(world):
    gateway, worker = await world.client(), await world.client()
    kept, dropped = await gateway.find("a"), await gateway.find("b")
    entries = [gateway.holds[kept][1], gateway.holds[dropped][1]]
    gateway.release(dropped)
    await eventually(lambda: world.arena.stats().num_leases == 1)
    with pytest.raises(HandoverFailed):
        await StoreEntries(worker.link).hold(entries)
    assert world.arena.stats().num_leases == 1, "all or none"


async def test_killed_client_loses_its_holds_when_its_process_is_gone(world):
    worker = await world.client()
    _, entry = worker.holds[await worker.find("a")]
    await worker.unplug()
    await asyncio.sleep(0.05)  # time: it must not be released before the process exits
    world.arena.clear()
    assert world.bytes_of(entry) == pattern("a") * ITEM_BYTES
    await worker.exit()
    await eventually(lambda: world.arena.stats().num_leases == 0)


async def test_lost_connection_keeps_what_the_living_client_still_holds(world):
    client = await world.client()
    kept, dropped = await client.find("a"), await client.find("b")
    await client.unplug()
    client.release(dropped)
    await client.cable.plug()
    await eventually(lambda: world.arena.stats().num_leases == 1)
    world.arena.clear()
    assert world.bytes_of(client.holds[kept][1]) == pattern("a") * ITEM_BYTES
    client.release(kept)
    await eventually(lambda: world.arena.stats().num_leases == 0)


async def test_second_connection_of_a_client_takes_over_what_it_holds(world):
    """The store has not noticed that the first is lost."""

    async def connect(holds=None):
        holds = holds or {}
        hello = StoreHello(client_id="one", arena=world.arena.id, holds=holds)
        client = StoreClient(RPC, holds=holds)
        await client.connect(world.address, hello)
        return client

    async def find(client, content):
        return await client.call(lambda call_id: FindItem(call_id, reference(content), "processed"))

    first = await connect()
    kept, _dropped = await find(first, "a"), await find(first, "b")
    second = await connect({kept.hold_id: HeldEntry(kept.range)})
    await asyncio.wait_for(first.closed.wait(), 5)
    await eventually(lambda: world.arena.stats().num_leases == 1)
    world.arena.clear()
    assert world.bytes_of(kept.range) == pattern("a") * ITEM_BYTES
    second.release(kept.hold_id)
    await eventually(lambda: world.arena.stats().num_leases == 0)
    await second.close()


async def test_cancelled_call_leaves_no_hold(world):
    client = await world.client()
    world.items.gate = asyncio.Event()
    for delay_s in (0.0, 0.002, 0.005):  # before, while and after the reply is under way
        finding = asyncio.create_task(client.find("a"))
        await asyncio.sleep(0.005)  # time: the call reaches the store
        world.items.gate.set()
        await asyncio.sleep(delay_s)  # time: at different points of the call
        finding.cancel()
        await asyncio.wait([finding])
        if not finding.cancelled():
            client.release(finding.result())
        world.items.gate.clear()
    await eventually(lambda: world.arena.stats().num_leases == 0 and not client.link.num_held)


@pytest.mark.parametrize("given", ["chatcmpl-7", ""])
async def test_lines_about_a_call_have_the_id_of_its_request(world, given):
    ids = []

    class Lines(logging.Handler):
        def emit(self, record):
            ids.append((record.getMessage(), request_id.get()))

    client = await world.client()
    world.items.error = RuntimeError("a bug")
    lines = Lines()
    logging.getLogger("medialane.store.server").addHandler(lines)
    try:
        with pytest.raises(MedialaneError, match="internal error"):
            await client.link.call(lambda call_id: FindItem(call_id, reference("a"), "processed", request_id=given))
    finally:
        logging.getLogger("medialane.store.server").removeHandler(lines)
    assert ids == [("a call has failed", given)]


def test_call_of_a_gateway_that_sends_no_id_is_understood():
    *fields, _ = msgspec.msgpack.decode(msgspec.msgpack.encode(FindItem(1, reference("a"), "processed")))
    assert decode_to_store(memoryview(msgspec.msgpack.encode(fields))) == FindItem(1, reference("a"), "processed")


async def test_draining_store_waits_for_the_calls_that_run_then(world):
    client = await world.client()
    world.items.gate = asyncio.Event()
    finding = asyncio.create_task(client.find("a"))
    await asyncio.sleep(0.05)  # time: the call reaches the store
    draining = asyncio.create_task(world.server.drain())
    await asyncio.sleep(0.05)  # time: it would have ended
    assert not draining.done()
    world.items.gate.set()
    await draining
    client.release(await finding)
    await world.server.drain()  # at once


async def upload(client: Client, write) -> ItemFound:
    return await client.link.call(
        lambda call_id: FindItem(call_id, reference("u"), "processed", num_bytes=ITEM_BYTES), write
    )


async def test_bytes_of_a_request_are_written_straight_into_the_arena(world):
    client = await world.client()

    async def write(question):
        client.link.payload(question.range)[:] = pattern("u") * ITEM_BYTES

    found = await upload(client, write)
    assert world.bytes_of(found.range) == pattern("u") * ITEM_BYTES
    assert world.arena.stats().num_reservations == 0


async def test_cancelled_upload_frees_its_range(world):
    client, writing = await world.client(), asyncio.Event()

    async def write(_question):
        writing.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(upload(client, write))
    await writing.wait()
    assert world.arena.stats().num_reservations == 1
    task.cancel()
    await eventually(lambda: world.arena.stats().num_reservations == 0)


async def test_range_of_a_killed_writer_is_freed_when_its_process_is_gone(world):
    client, writing = await world.client(), asyncio.Event()

    async def write(_question):
        writing.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(upload(client, write))
    await writing.wait()
    await client.unplug()
    await asyncio.sleep(0.05)  # time: a living process may still be writing
    assert world.arena.stats().num_reservations == 1
    await client.exit()
    await eventually(lambda: world.arena.stats().num_reservations == 0)
    task.cancel()


async def test_calls_wait_for_a_store_that_restarts_and_fail_after_the_deadline(monkeypatch):
    world = await World(monkeypatch).start()
    client = await world.client()
    await client.find("a")
    await world.close()
    again = World(monkeypatch)
    again.address = world.address
    finding = asyncio.create_task(client.find("b"))
    await asyncio.sleep(0.1)  # time: the store is away
    assert not finding.done()
    await again.start()
    hold_id = await finding
    assert client.holds[hold_id][1].arena == again.arena.id
    assert client.link.num_held == 1, "the hold at the earlier store has ended with it"
    impatient = await again.client(wait_timeout_s=0.1)
    await again.close()
    with pytest.raises(StoreUnavailable) as refused:
        await impatient.find("c")
    assert (refused.value.status, refused.value.retry_after_s) == (503, 1)
    await impatient.exit()
    await client.exit()


async def test_socket_is_private_and_a_client_of_another_release_is_refused(world):
    path = world.address.removeprefix("unix:")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    with pytest.raises(StartupFailed, match=r"the client speaks protocol 0, the store \d+ .*same release"):
        await StoreClient(RPC).connect(world.address, StoreHello(version=0, client_id="x"))


def test_client_of_a_release_with_another_hello_is_known_by_its_number():
    hello = msgspec.msgpack.encode(["StoreHello", 99, 7])
    assert decode_to_store(memoryview(hello)).version == 99


async def test_release_of_what_is_not_held_ends_only_that_connection(world):
    one, other = await world.client(), await world.client()
    held = await other.find("a")
    one.link.release(7, world.arena.id)
    await eventually(lambda: one.cable.num_made == 2)
    await other.link.refresh(5)
    assert (other.cable.num_made, other.cable.num_open) == (1, 1)
    other.release(held)


async def test_status_is_refreshed_on_request(world):
    client = await world.client()
    hold_id = await client.find("a")
    await client.link.refresh(5)
    assert client.link.status.stats.arena.num_leases == 1
    client.release(hold_id)
    await client.link.refresh(5)
    assert client.link.status.stats.arena.num_leases == 0


@pytest.mark.parametrize("media", ["z" * 64, "ab", ""])
def test_what_is_no_hash_of_leased_media_is_no_message(media):
    with pytest.raises(ProtocolViolation):
        decode_to_store(memoryview(msgspec.msgpack.encode(AskLease(1, "owner", media, "find"))))


def test_unreadable_frames_are_violations():
    for decode in (decode_to_store, decode_from_store):
        for frame in (b"", b"\xc1", b"\x91\xa1x", b"\x93\xa8FindItem\x01\x90"):
            with pytest.raises(ProtocolViolation):
                decode(memoryview(frame))


async def test_items_wait_for_memory_that_is_being_prefaulted(monkeypatch):
    world = await World(monkeypatch, grows=True).start()
    gateway = await world.client()
    finding = asyncio.create_task(gateway.find("a"))
    await asyncio.sleep(0.1)  # time: until the first attempt has failed
    assert not finding.done()
    world.arena.prefaulted(world.arena.size_bytes)
    gateway.release(await asyncio.wait_for(finding, 5))
    await gateway.exit()
    await world.close()


async def test_memory_that_comes_before_the_failure_for_want_of_it_is_used(monkeypatch):
    world = await World(monkeypatch, grows=True).start()
    world.items.closed = asyncio.Event()
    gateway = await world.client()
    finding = asyncio.create_task(gateway.find("a"))
    await asyncio.sleep(0.1)  # time: until the first attempt is failing
    world.arena.prefaulted(world.arena.size_bytes)
    world.items.closed.set()
    gateway.release(await asyncio.wait_for(finding, 5))
    await gateway.exit()
    await world.close()


async def test_take_over_that_ends_before_a_failure_for_want_of_memory_is_waited_for(world):
    absent, gateway = await world.client(), await world.client()
    await absent.unplug()
    await world.replace_store()
    world.items.closed = asyncio.Event()
    finding = asyncio.create_task(gateway.find("a"))
    await asyncio.sleep(0.3)  # time: until the gateway is connected and the first attempt is failing
    assert not finding.done()
    await absent.exit()
    await asyncio.sleep(0.1)  # time: until the store has seen it
    world.items.closed.set()
    gateway.release(await asyncio.wait_for(finding, 5))


async def test_arena_that_stops_growing_is_full_after_a_deadline(monkeypatch):
    monkeypatch.setattr("medialane.store.server.GROWTH_TIMEOUT_S", 0.1)
    world = await World(monkeypatch, grows=True).start()
    gateway = await world.client()
    with pytest.raises(ArenaFull):
        await asyncio.wait_for(gateway.find("a"), 5)
    await gateway.exit()
    await world.close()


async def is_exposed(client):
    return await client.entries.exposed_stats() is not None


async def test_store_without_a_gateway_is_exposed_by_one_of_the_workers_that_are_scraped(world):
    unscraped, first, second = [await world.client(scraped=scraped) for scraped in (None, "worker", "worker")]
    assert await first.entries.exposed_stats() is not None
    assert await second.entries.exposed_stats() is None
    assert await unscraped.entries.exposed_stats() is None
    await first.exit()
    await eventually(lambda: is_exposed(second))
    assert (await second.entries.exposed_stats()).arena.size_bytes == world.arena.stats().size_bytes


async def test_store_with_a_gateway_is_exposed_by_that_alone(world):
    worker = await world.client(scraped="worker")
    gateway = await world.client(scraped="gateway")
    assert await worker.entries.exposed_stats() is None
    await gateway.exit()
    await eventually(lambda: is_exposed(worker))
    await world.server.close()
    await eventually(lambda: worker.link.status is None)
    assert await worker.entries.exposed_stats() is None


async def test_recorded_hold_names_its_client_its_request_and_the_code_that_took_it(world):
    holds = world.arena.record_holds()
    gateway = await world.client(names_takers=True, scraped="gateway")
    TAKER.set("request 1")
    hold_id = await gateway.find("a")
    (record,) = holds.records(10)
    assert record.taker.startswith(f"gateway {gateway.link.client_id[:8]}: FindItem for request 1 (")
    assert "client.py" in record.taker
    assert record.age_s < 10
    gateway.release(hold_id)
    await eventually(lambda: not holds.records(10))
