"""An embedding from the engine that has encoded an item to the gateways and stores of two hosts."""

from __future__ import annotations

import gc
import tempfile
from contextlib import AsyncExitStack

import msgspec
import pytest
from gateway_parts import png
from host_store import HostStore, StoreClientTask

from medialane.arena import Arena, ArenaConfig, FillWriter
from medialane.store import FindItem, StoreEntries, StoreGrants
from medialane.types.feature import WantedEmbedding
from medialane.types.hashing import content_hash, embedding_key
from medialane.types.media import MediaRef
from medialane.types.tensor import TensorSpec
from waiting import eventually

ENCODER = "digest of an encoder"
SPEC = TensorSpec("float32", (40, 100))
OUTPUT = bytes(range(250)) * (SPEC.nbytes // 250)


@pytest.fixture
async def near(arena, preparers):
    async with HostStore(arena, preparers, None) as store:
        yield store


@pytest.fixture
async def far():
    """The store of another host, which has no preparers."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="host-") as folder:
        arena = Arena.create(ArenaConfig(size_bytes=32 << 20, directory=folder))
        async with HostStore(arena, None, None) as store:
            yield store
        arena.close()
        assert (arena.stats().num_leases, arena.stats().num_reservations) == (0, 0)
    gc.collect()


@pytest.fixture
async def clients():
    """Connects workers to stores."""
    async with AsyncExitStack() as stack:

        async def connect(store):
            client = StoreClientTask(store.address, str(store.arena.path.parent))
            stack.push_async_callback(client.close)
            await client.link.ready()
            return client.link

        yield connect


async def find(link, data, *, encoder=ENCODER):
    """As a gateway, which sends the bytes if the store asks for them."""
    ref = MediaRef("image", "image", content=content_hash(data))

    async def send(question):
        link.payload(question.range)[:] = data

    return await link.call(lambda call_id: FindItem(call_id, ref, "processed", b"{}", len(data), encoder), send)


async def test_embedding_that_one_engine_has_written_is_read_on_two_hosts_instead_of_pixels(near, far, clients):
    data = png()
    pixels = await find(near.link, data)
    assert (pixels.feature.embedding, pixels.is_hit) == (None, False)
    assert pixels.feature.tensors

    key = embedding_key(mm_hash=pixels.feature.mm_hash, encoder=ENCODER)
    described = msgspec.structs.replace(pixels.feature, tensors=())
    worker = StoreEntries(await clients(near))
    fill = await worker.embedding(WantedEmbedding(key, described, SPEC), wait_s=0)
    assert not fill.is_filled
    with FillWriter.open(fill.embedding.tensor.range, str(near.arena.path.parent)) as payload:
        payload[:] = OUTPUT
    fill.hold.release()
    near.link.release(pixels.hold_id, pixels.range.arena)
    await eventually(lambda: near.arena.contains(key, "embedded") and not near.arena.stats().num_leases)

    found = await find(near.link, data)
    assert found.is_hit
    assert found.feature == msgspec.structs.replace(described, embedding=fill.embedding)
    assert bytes(near.link.tensor(found.feature.embedding.tensor)) == OUTPUT
    other = await find(near.link, data, encoder="another")
    assert other.feature == pixels.feature

    (remote,) = await StoreGrants(near.link).grant([found.range])
    assert (remote.kind, remote.key) == ("embedded", key)
    far_link = await clients(far)
    hold, ((copy, mover),) = await StoreEntries(far_link).pull([remote])
    assert mover == "tcp"
    there = await find(far.link, data)
    assert (there.range, there.feature.embedding.tensor.range) == (copy, copy)
    assert bytes(far.link.tensor(there.feature.embedding.tensor)) == OUTPUT
    hold.release()


async def test_two_workers_encode_an_item_once(near, clients):
    data = png()
    pixels = await find(near.link, data)
    key = embedding_key(mm_hash=pixels.feature.mm_hash, encoder=ENCODER)
    described = msgspec.structs.replace(pixels.feature, tensors=())
    one, two = [StoreEntries(await clients(near)) for _ in range(2)]
    fill = await one.embedding(WantedEmbedding(key, described, SPEC), wait_s=0)
    assert await two.embedding(WantedEmbedding(key, described, SPEC), wait_s=0) is None
    fill.hold.release()
    fill = await two.embedding(WantedEmbedding(key, described, SPEC), wait_s=5)
    assert not fill.is_filled
    with FillWriter.open(fill.embedding.tensor.range, str(near.arena.path.parent)) as payload:
        payload[:] = OUTPUT
    fill.hold.release()
    await eventually(lambda: near.arena.contains(key, "embedded"))
    found = await one.embedding(WantedEmbedding(key, described, SPEC), wait_s=0)
    assert found.is_filled
    found.hold.release()
