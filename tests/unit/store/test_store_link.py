"""A link to the store: what calls do while the connection is lost, and how it ends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from medialane.gateway import StoreFeatures
from medialane.media import MediaConfig
from medialane.observability import StageTimeline
from medialane.runtime.tasks import LoopFairness
from medialane.store import StoreEntries
from medialane.types.errors import StartupFailed, StoreUnavailable
from medialane.types.hashing import content_hash
from medialane.types.media import MediaRef
from waiting import eventually

SETTINGS = {"model": "a", "dtype": "float16"}
OTHER_SETTINGS = {"model": "b", "dtype": "float16"}


@pytest.fixture
async def gateway(world):
    client = await world.client(processor=SETTINGS)
    yield client
    await client.disconnect()


@pytest.fixture
async def worker(world):
    client = await world.client()
    yield client
    await client.disconnect()


async def test_call_in_the_iteration_in_which_the_connection_is_lost_waits_for_the_next(world, gateway):
    lost = gateway.link._client

    async def call_at_the_loss() -> int:
        while not lost.closed.is_set():  # noqa: ASYNC110 - before the link is woken by it
            await asyncio.sleep(0)
        return await gateway.find("a")

    call = asyncio.create_task(call_at_the_loss())
    await world.lose_connection(gateway)
    gateway.release(await call)


async def test_only_waiting_counts_towards_the_deadline(world, gateway):
    gateway.link._wait_timeout_s = 0.5
    world.items.gate = asyncio.Event()
    call = asyncio.create_task(gateway.find("a"))
    await asyncio.sleep(0.6)  # time: the call takes longer than it may wait
    await world.lose_connection(gateway)
    world.items.gate.set()
    gateway.release(await call)


async def test_cancelled_link_closes_its_connection(world, gateway):
    connection = gateway.link._client
    gateway.running.cancel()
    await asyncio.wait([gateway.running])
    assert connection.closed.is_set()
    await eventually(lambda: not world.server._sessions)


async def test_entries_of_a_removed_arena_are_refused_without_waiting_for_the_next_store(world, gateway):
    worker = await world.client()
    _, entry = gateway.holds[await gateway.find("a")]
    await world.close()
    await eventually(lambda: worker.link.arena is None)
    with pytest.raises(StoreUnavailable):
        async with asyncio.timeout(0.5):
            await StoreEntries(worker.link).hold([entry])
    await worker.disconnect()


async def test_refusal_says_when_the_store_is_expected_back(world, gateway):
    """It has been missing for longer than it took to connect to it at first."""
    gateway.link._wait_timeout_s = 1.3
    await world.server.close()
    with pytest.raises(StoreUnavailable) as refused:
        await gateway.find("a")
    assert refused.value.retry_after_s == 2


async def test_store_restarted_with_other_processor_settings_is_not_used(world, gateway, caplog):
    gateway.link._wait_timeout_s = 0.3
    world.processor = OTHER_SETTINGS
    await gateway.link._client.close()
    with pytest.raises(StoreUnavailable):
        await gateway.find("a")
    assert any("setting model is b in the media store and a in this gateway" in r.getMessage() for r in caplog.records)
    world.processor = SETTINGS
    gateway.link._wait_timeout_s = 5
    gateway.release(await gateway.find("a"))


async def test_store_that_has_loaded_other_settings_refuses_the_gateway(world, gateway, worker):
    """It listens before it knows them."""
    world.has_started = False
    await gateway.link._client.close()
    await eventually(lambda: gateway.link._client is not None and not gateway.link._client.closed.is_set())
    ready = asyncio.create_task(gateway.link.ready())
    await asyncio.wait([ready], timeout=0.1)
    assert not ready.done(), "it is connected, but its features might be of another processor"
    world.processor = OTHER_SETTINGS
    world.server.loaded()
    with pytest.raises(StartupFailed, match="setting model is b in the media store and a in this gateway"):
        await asyncio.wait_for(ready, 5)
    assert not worker.link._client.closed.is_set(), "it wants no features"


async def test_link_is_ready_when_the_store_has_started(world, gateway):
    world.has_started = False
    await gateway.link._client.close()
    ready = asyncio.create_task(gateway.link.ready())
    await eventually(lambda: gateway.link.status is not None)
    assert not ready.done()
    world.has_started, world.processor = True, SETTINGS
    world.server.loaded()
    world.server.started()
    await asyncio.wait_for(ready, 5)


async def test_upload_that_loses_its_store_is_written_again_at_the_next_connection(world, gateway, monkeypatch):
    fairness = LoopFairness()
    features = StoreFeatures(gateway.link, processor_digest="d", fairness=fairness, media=MediaConfig())
    payload, at_payload, num_writes = gateway.link.payload, asyncio.Event(), 0

    def watched(entry):
        nonlocal num_writes
        num_writes += 1
        at_payload.set()
        return payload(entry)

    monkeypatch.setattr(gateway.link, "payload", watched)
    data = b"u" * (4 << 20)
    sent = MediaRef("image", "p", data=data)
    budget = SimpleNamespace(processed_bytes=lambda _: 0, missing=lambda: None)
    finding = asyncio.create_task(features.processed(sent, b"{}", StageTimeline(), budget))
    await at_payload.wait()
    before = num_writes
    await gateway.link._client.close()
    item = await asyncio.wait_for(finding, 5)
    assert num_writes > before
    with world.arena.lookup(content_hash(data)) as lease:
        start = lease.range.offset + 64
        assert bytes(world.arena.view.memory[start : start + len(data)]) == data
    item.hold.release()
    fairness.close()
