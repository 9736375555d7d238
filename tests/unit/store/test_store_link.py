"""A link to the store: what calls do while the connection is lost, and how it ends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from medialane.gateway import StoreItems
from medialane.media import MediaConfig
from medialane.observability import RequestTimeline
from medialane.store import StoreEntries, StoreLink
from medialane.types.errors import StartupFailed, StoreUnavailable
from medialane.types.hashing import content_hash
from medialane.types.media import MediaRef
from waiting import eventually, iterations

SETTINGS = {"model": "a", "dtype": "float16"}
OTHER_SETTINGS = {"model": "b", "dtype": "float16"}


@pytest.fixture
async def gateway(world):
    client = await world.client(processor=SETTINGS)
    yield client
    await client.exit()


@pytest.fixture
async def worker(world):
    client = await world.client()
    yield client
    await client.exit()


async def test_call_in_the_iteration_in_which_the_connection_is_lost_waits_for_the_next(world, gateway):
    """One call in each iteration from before the loss until the link has noticed it."""
    calls = []
    gateway.cable.cut()
    while gateway.link.status is not None:
        calls.append(asyncio.create_task(gateway.find("a")))
        await iterations(1)
    for call in calls:
        gateway.release(await call)


async def test_only_waiting_counts_towards_the_deadline(world):
    gateway = await world.client(wait_timeout_s=1.5)
    world.items.gate = asyncio.Event()
    call = asyncio.create_task(gateway.find("a"))
    await asyncio.sleep(1.6)  # time: the call takes longer than it may wait
    await gateway.lose_connection()
    world.items.gate.set()
    gateway.release(await call)


async def test_cancelled_link_closes_its_connection(world, gateway):
    gateway.running.cancel()
    await asyncio.wait([gateway.running])
    await eventually(lambda: gateway.cable.num_open == 0)


async def test_entries_of_a_removed_arena_are_refused_without_waiting_for_the_next_store(world, gateway):
    worker = await world.client()
    _, entry = gateway.holds[await gateway.find("a")]
    await world.close()
    await eventually(lambda: worker.link.arena is None)
    with pytest.raises(StoreUnavailable):
        async with asyncio.timeout(3):
            await StoreEntries(worker.link).hold([entry])
    await worker.exit()


async def test_refusal_says_when_the_store_is_expected_back(world):
    """It has been missing for longer than it took to connect to it at first."""
    gateway = await world.client(wait_timeout_s=1.3)
    await world.server.close()
    with pytest.raises(StoreUnavailable) as refused:
        await gateway.find("a")
    assert refused.value.retry_after_s == 2


async def test_store_restarted_with_other_processor_settings_is_not_used(world, caplog):
    gateway = await world.client(processor=SETTINGS, wait_timeout_s=0.3)
    world.processor = OTHER_SETTINGS
    gateway.cable.cut()
    await eventually(lambda: gateway.link.status is None)
    with pytest.raises(StoreUnavailable):
        await gateway.find("a")
    assert any("setting model is b in the media store and a in this gateway" in r.getMessage() for r in caplog.records)
    world.processor = SETTINGS
    await eventually(lambda: gateway.link.status is not None)
    gateway.release(await gateway.find("a"))


async def test_store_that_has_loaded_other_settings_refuses_the_gateway(world, gateway, worker):
    """It listens before it knows them."""
    world.has_started = False
    await gateway.lose_connection()
    ready = asyncio.create_task(gateway.link.ready())
    await asyncio.wait([ready], timeout=0.1)
    assert not ready.done(), "it is connected, but its features might be of another processor"
    world.processor = OTHER_SETTINGS
    world.server.loaded()
    with pytest.raises(StartupFailed, match="setting model is b in the media store and a in this gateway"):
        await asyncio.wait_for(ready, 5)
    await worker.link.refresh(5)
    assert (worker.cable.num_made, worker.cable.num_open) == (1, 1), "it wants no features"


async def test_link_is_ready_when_the_store_has_started(world, gateway):
    world.has_started = False
    await gateway.lose_connection()
    ready = asyncio.create_task(gateway.link.ready())
    await iterations(5)
    assert not ready.done()
    world.has_started, world.processor = True, SETTINGS
    world.server.loaded()
    world.server.started()
    await asyncio.wait_for(ready, 5)


class CuttingLink(StoreLink):
    """Its connection is lost while the first piece is written."""

    num_pieces = 0

    def payload(self, entry):
        self.num_pieces += 1
        if self.num_pieces == 1:
            self.cable.cut()
        return super().payload(entry)


async def test_upload_that_loses_its_store_is_written_again_at_the_next_connection(world, fairness):
    gateway = await world.client(link=CuttingLink)
    gateway.link.cable = gateway.cable
    features = StoreItems(gateway.link, processor_digest="d", fairness=fairness, media=MediaConfig())
    data = b"u" * (4 << 20)
    sent = MediaRef("image", "p", data=data)
    budget = SimpleNamespace(num_bytes=lambda *_: 0, missing=lambda: None)
    item = await asyncio.wait_for(features.processed(sent, b"{}", RequestTimeline(), budget), 5)
    assert gateway.link.num_pieces > len(data) // (512 << 10), "all of them after the first"
    assert gateway.cable.num_made == 2
    with world.arena.lookup(content_hash(data)) as pin:
        start = pin.range.offset + 64
        assert bytes(world.arena.view.memory[start : start + len(data)]) == data
    item.hold.release()
