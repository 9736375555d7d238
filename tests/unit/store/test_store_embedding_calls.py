"""Embeddings over a real socket: clients that write them, wait, lose their connection, and die."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from store_world import DIRECTORY, EMBEDDING, ITEM_BYTES, pattern, wanted, write

from medialane.arena import FillWriter
from medialane.store import StoreEntries
from medialane.types.errors import HandoverFailed, StoreUnavailable
from medialane.types.tensor import TensorSpec
from poison import POISON
from waiting import eventually, iterations, line_of

WRITER = Path(__file__).parents[1] / "arena" / "writer.py"


def is_cached(world, content):
    return world.arena.contains(content * 64, "embedded")


def engine_writing(entry):
    """A process of an engine that writes to `entry`, to kill."""
    command = [sys.executable, str(WRITER), DIRECTORY, msgspec.json.encode(entry).decode()]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


async def filled(world, client, content):
    found = await client.embedding(content)
    assert not found.is_filled
    write(found, content)
    found.hold.release()
    await eventually(lambda: is_cached(world, content))


async def test_what_one_worker_has_written_another_reads(world):
    one, two = await world.client(), await world.client()
    await filled(world, one, "a")
    found = await two.embedding("a")
    assert found.is_filled
    assert found.embedding.key == "a" * 64
    assert found.embedding.tensor.spec == EMBEDDING
    world.arena.clear()
    assert world.bytes_of(found.embedding.tensor.range) == pattern("a") * ITEM_BYTES
    found.hold.release()
    await eventually(lambda: world.arena.stats().num_leases == 0)


async def test_embedding_that_a_worker_reads_is_held_for_its_other_requests_without_a_message(world):
    one, two = await world.client(), await world.client()
    await filled(world, one, "a")
    entries = StoreEntries(two.link, retention_s=60)

    async def find(spec=EMBEDDING):
        return await entries.embedding(wanted("a", spec), wait_s=0)

    first = await find()
    await two.unplug()
    second = await find()
    second.hold.release()
    first.hold.release()
    third = await find()
    assert await find(TensorSpec("float32", (1, 1))) is None
    assert {found.embedding for found in (first, second, third)} == {first.embedding}
    assert all(found.is_filled for found in (first, second, third))
    assert world.arena.stats().num_leases == 1
    third.hold.release()


async def test_embedding_that_a_worker_has_written_is_found_like_any_other(world):
    one = await world.client()
    one.entries = StoreEntries(one.link, retention_s=60)
    await filled(world, one, "a")
    found = await one.embedding("a")
    assert found.is_filled, "the range that was written is not retained as such"
    found.hold.release()


async def test_worker_that_waits_gets_what_another_writes_meanwhile(world):
    one, two = await world.client(), await world.client()
    fill = await one.embedding("a")
    task = asyncio.create_task(two.embedding("a", wait_s=50))
    await eventually(lambda: world.items.embeddings.stats.num_waited == 1)
    write(fill, "a")
    fill.hold.release()
    found = await asyncio.wait_for(task, 5)
    assert found.is_filled
    found.hold.release()


async def test_worker_that_waits_writes_when_the_other_is_killed(world):
    one, two = await world.client(), await world.client()
    await one.embedding("a")
    task = asyncio.create_task(two.embedding("a", wait_s=50))
    await eventually(lambda: world.items.embeddings.stats.num_waited == 1)
    await one.unplug()
    assert not task.done()
    await one.exit()
    found = await asyncio.wait_for(task, 5)
    assert not found.is_filled
    write(found, "a")
    found.hold.release()
    await eventually(lambda: is_cached(world, "a"))


async def test_embedding_is_cached_although_the_worker_died_after_its_engine_had_written_it(world):
    one, two = await world.client(), await world.client()
    write(await one.embedding("a"), "a")
    await one.exit()
    await eventually(lambda: is_cached(world, "a"))
    (await two.embedding("a")).hold.release()


async def test_range_of_a_dead_worker_is_freed_only_when_its_engine_does_not_write_any_more(world):
    one = await world.client()
    entry = (await one.embedding("a")).embedding.tensor.range
    with FillWriter.open(entry, DIRECTORY) as payload:
        await one.exit()
        await eventually(lambda: world.items.embeddings.stats.num_revoking == 1)
        payload[:] = pattern("w") * len(payload)
        world.arena.clear()
        assert world.bytes_of(entry) == pattern("w") * ITEM_BYTES
        assert world.arena.stats().num_reservations == 1
    await eventually(lambda: world.arena.stats().num_reservations == 0)
    assert not is_cached(world, "a")


async def test_range_of_a_killed_worker_and_its_killed_engine_is_freed(world):
    one = await world.client()
    entry = (await one.embedding("a")).embedding.tensor.range
    with engine_writing(entry) as engine:
        assert await asyncio.to_thread(line_of, engine) == b"writing\n"
        await one.exit()
        await eventually(lambda: world.items.embeddings.stats.num_revoking == 1)
        world.arena.clear()
        assert world.bytes_of(entry)[:1] == b"\1"
        engine.kill()
    await eventually(lambda: world.arena.stats().num_reservations == 0)
    assert world.bytes_of(entry) == POISON * ITEM_BYTES


async def test_lost_connection_does_not_end_a_fill(world):
    one, two = await world.client(), await world.client()
    fill = await one.embedding("a")
    await one.lose_connection()
    assert await two.embedding("a") is None, "it is still written"
    assert await one.embedding("a") is None
    write(fill, "a")
    fill.hold.release()
    await eventually(lambda: is_cached(world, "a"))


async def test_fill_that_was_released_while_the_connection_was_lost_ends(world):
    one = await world.client()
    fill = await one.embedding("a")
    await one.unplug()
    fill.hold.release()
    await one.cable.plug()
    await eventually(lambda: world.arena.stats().num_reservations == 0)
    with pytest.raises(HandoverFailed):
        write(fill, "a")


async def test_cancelled_call_leaves_no_fill(world):
    one, two = await world.client(), await world.client()
    fill = await one.embedding("a")
    task = asyncio.create_task(two.embedding("a", wait_s=50))
    await eventually(lambda: world.items.embeddings.stats.num_waited == 1)
    task.cancel()
    await asyncio.wait([task])
    fill.hold.release()
    await eventually(lambda: world.arena.stats().num_reservations == 0)
    await eventually(lambda: world.items.embeddings.stats.num_writing == 0)
    again = await two.embedding("a")
    assert not again.is_filled, "it is not its own writer"
    again.hold.release()


async def test_call_cancelled_while_its_reply_arrives_leaves_no_fill(world):
    one = await world.client()
    for _ in range(5):
        task = asyncio.create_task(one.embedding("a"))
        async with asyncio.timeout(5):
            while not world.items.embeddings.stats.num_writing:
                await iterations(1)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await eventually(lambda: world.arena.stats().num_reservations == 0)


async def test_retained_holds_make_room_for_an_embedding(world):
    one, two = await world.client(), await world.client()
    retaining = StoreEntries(one.link, retention_s=60)
    for content in "abcdefghijklmnopqrstuvwxyz123456":
        two.release(await two.find(content))
    hold_id = await two.find("z")
    held = await retaining.hold([two.holds[hold_id][1]])
    held.release()
    two.release(hold_id)
    await eventually(lambda: world.arena.stats().num_leases == 1)
    spec = TensorSpec("uint8", (world.arena.max_payload_bytes,))
    found = await two.entries.embedding(wanted("b", spec), wait_s=0)
    assert found is not None
    found.hold.release()


async def test_no_embedding_is_kept_without_memory(world):
    one = await world.client()
    held = await one.find("a")
    spec = TensorSpec("uint8", (world.arena.max_payload_bytes,))
    assert await one.entries.embedding(wanted("b", spec), wait_s=0) is None
    one.release(held)
    assert world.items.embeddings.stats.num_writing == 0


async def test_lost_store_is_reported_at_once(world):
    one = await world.client()
    await one.exit()
    with pytest.raises(StoreUnavailable):
        await asyncio.wait_for(one.embedding("a"), 1)


async def test_store_that_stops_frees_what_is_written(world):
    one = await world.client()
    fill = await one.embedding("a")
    with FillWriter.open(fill.embedding.tensor.range, DIRECTORY):
        await world.server.close()
        assert world.arena.stats().num_reservations == 0
    with pytest.raises(HandoverFailed):
        write(fill, "a")
