"""Holds that are retained after their last use, over a real store."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest
from store_world import ITEM_BYTES, pattern

from medialane.store import StoreEntries
from medialane.types.errors import ArenaFull
from waiting import eventually


@pytest.fixture
async def gateway(world):
    client = await world.client()
    yield client
    await client.exit()


@pytest.fixture
async def worker(world):
    client = await world.client()
    client.num_calls = 0
    call = client.link.call

    async def counted(*args, **settings):
        client.num_calls += 1
        return await call(*args, **settings)

    client.link.call = counted
    yield client
    await client.exit()


async def sent(gateway, content):
    hold_id = await gateway.find(content)
    return gateway.holds[hold_id][1]


async def fill(gateway):
    """Hold new items until one is refused; return their number."""
    for num_items in count():
        try:
            await sent(gateway, chr(99 + num_items))
        except ArenaFull:
            break
    return num_items


def num_leases(world):
    return world.arena.stats().num_leases


async def test_item_that_is_used_again_needs_no_message(world, gateway, worker):
    entries, entry = StoreEntries(worker.link, retention_s=60), await sent(gateway, "a")
    for _ in range(3):
        (await entries.hold([entry])).release()
    assert worker.num_calls == 1


async def test_item_in_use_is_shared(world, gateway, worker):
    entries, entry = StoreEntries(worker.link, retention_s=0), await sent(gateway, "a")
    first, second = await entries.hold([entry]), await entries.hold([entry])
    assert worker.num_calls == 1
    first.release()
    gateway.release(next(iter(gateway.holds)))
    world.arena.clear()
    assert world.bytes_of(entry) == pattern("a") * ITEM_BYTES
    second.release()
    await eventually(lambda: num_leases(world) == 0)


async def test_hold_is_asked_for_only_for_items_that_are_not_held(world, gateway, worker):
    entries = StoreEntries(worker.link, retention_s=60)
    one, other = await sent(gateway, "a"), await sent(gateway, "b")
    (await entries.hold([one])).release()
    (await entries.hold([one, other])).release()
    assert num_leases(world) == 4
    (await entries.hold([other, one])).release()
    assert worker.num_calls == 2


async def test_retained_hold_ends_after_its_time(world, gateway, worker):
    entries = StoreEntries(worker.link, retention_s=0.1)
    (await entries.hold([await sent(gateway, "a"), await sent(gateway, "b")])).release()
    assert num_leases(world) == 4
    await eventually(lambda: num_leases(world) == 2)


async def test_nothing_is_retained_by_default(world, gateway, worker):
    (await StoreEntries(worker.link).hold([await sent(gateway, "a")])).release()
    await eventually(lambda: num_leases(world) == 1)


async def test_at_most_an_eighth_of_the_arena_is_retained(world, gateway, worker):
    entries, contents = StoreEntries(worker.link, retention_s=60), "abcdef"
    for content in contents:
        (await entries.hold([await sent(gateway, content)])).release()
    num_retained = world.arena.size_bytes // 8 // ITEM_BYTES
    await eventually(lambda: num_leases(world) == len(contents) + num_retained)


async def test_nothing_is_retained_while_half_of_the_arena_is_held(world, gateway, worker):
    entries, entry = StoreEntries(worker.link, retention_s=60), await sent(gateway, "a")
    num_held = 1
    while world.arena.stats().pinned_bytes <= world.arena.size_bytes // 2:
        await sent(gateway, chr(98 + num_held))
        num_held += 1
    await worker.link.refresh(5)
    (await entries.hold([entry])).release()
    await eventually(lambda: num_leases(world) == num_held)


async def test_retained_holds_end_before_an_item_is_refused(world, gateway, worker):
    entries = StoreEntries(worker.link, retention_s=60)
    for content in "ab":
        (await entries.hold([await sent(gateway, content)])).release()
        gateway.release(next(iter(gateway.holds)))
    await eventually(lambda: num_leases(world) == 2)
    assert await fill(gateway) == (world.arena.size_bytes - 4096) // (ITEM_BYTES + 128), (
        "all of the arena, the two included"
    )


async def test_client_that_does_not_answer_delays_a_refusal_only_briefly(world, gateway, worker):
    retained = await StoreEntries(worker.link, retention_s=60).hold([await sent(gateway, "a")])
    retained.release()
    async with worker.cable.stalled():
        assert await fill(gateway) > 20


async def test_client_that_is_lost_while_it_is_asked_does_not_delay_a_refusal(world, gateway, worker, monkeypatch):
    monkeypatch.setattr("medialane.store.server.RECLAIM_TIMEOUT_S", 60.0)
    worker.link.watch_reclaim(worker.cable.cut)
    async with asyncio.timeout(10):
        assert await fill(gateway) > 20
    assert worker.cable.num_open == 0 or worker.cable.num_made > 1


async def test_lost_connection_ends_no_holds(world, gateway, worker):
    entries = StoreEntries(worker.link, retention_s=60)
    used, retained = await sent(gateway, "a"), await sent(gateway, "b")
    hold = await entries.hold([used])
    (await entries.hold([retained])).release()
    await worker.lose_connection()
    assert num_leases(world) == 4
    (await entries.hold([used, retained])).release()
    assert worker.num_calls == 2, "both are held"
    hold.release()


async def test_hold_is_released_once(world, gateway, worker):
    hold = await StoreEntries(worker.link, retention_s=60).hold([await sent(gateway, "a")])
    hold.release()
    with pytest.raises(RuntimeError, match="already released"):
        hold.release()
