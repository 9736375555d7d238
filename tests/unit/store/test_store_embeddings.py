"""Embeddings in the arena: one client writes each, others wait for it."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from builders import checked_arena
from medialane.arena import FillWriter, describe
from medialane.store import FindEmbedding
from medialane.store.embeddings import Embeddings
from medialane.store.messages import MAX_EMBEDDING_WAIT_MS, decode_to_store
from medialane.types.errors import ArenaFull, ProtocolViolation
from medialane.types.feature import MAX_HEADER_BYTES, Embedding, Feature
from medialane.types.media import MediaSize
from medialane.types.tensor import ArenaRange, TensorSpec
from poison import poison_freed
from waiting import eventually, iterations

MIB = 1 << 20
DIRECTORY = "/dev/shm"
SPEC = TensorSpec("float32", (100, 64))
KEY = "e" * 64
MM_HASH = "f" * 64
FEATURE = Feature("image", MM_HASH, b"header", (), MediaSize(60, 40))


def wanted(key=KEY, spec=SPEC, wait_ms=0.0, feature=FEATURE):
    return FindEmbedding(1, key, feature, spec, wait_ms)


def write(fill, byte=b"e"):
    with FillWriter.open(fill.embedding.tensor.range, DIRECTORY) as payload:
        payload[:] = byte * len(payload)


@pytest.fixture
def arena(monkeypatch):
    poison_freed(monkeypatch)
    with checked_arena() as arena:
        yield arena


@pytest.fixture
def embeddings(arena):
    made = Embeddings(arena)
    yield made
    made.close()


async def published(embeddings, client=1, **changed):
    fill = await embeddings.find(wanted(**changed), client)
    write(fill)
    fill.hold.release()


async def test_first_client_writes_and_all_others_read_it(arena, embeddings):
    fill = await embeddings.find(wanted(), 1)
    assert not fill.is_filled
    assert fill.embedding.tensor.spec == SPEC
    write(fill)
    fill.hold.release()
    for client in (1, 2):
        found = await embeddings.find(wanted(), client)
        assert found.is_filled
        assert found.embedding == fill.embedding
        assert bytes(arena.view.tensor(found.embedding.tensor)) == b"e" * SPEC.nbytes
        found.hold.release()
    with arena.lookup(KEY, "embedded") as cached:
        assert cached.value == msgspec.structs.replace(FEATURE, embedding=fill.embedding)
    stats = embeddings.stats
    assert (stats.num_filled, stats.num_found, stats.num_dropped, stats.num_writing) == (1, 2, 0, 0)


@pytest.mark.parametrize("client", [1, 2])
async def test_completed_embedding_is_found_before_its_writer_releases_it(arena, embeddings, client):
    fill = await embeddings.find(wanted(), 1)
    write(fill)
    found = await embeddings.find(wanted(), client)
    assert found.is_filled
    assert found.embedding == fill.embedding
    with embeddings.lookup(KEY):
        assert arena.stats().num_leases == 2
    fill.hold.release()
    assert embeddings.stats.num_filled == 1
    assert bytes(arena.view.tensor(found.embedding.tensor)) == b"e" * SPEC.nbytes
    found.hold.release()


async def test_release_of_a_fill_that_was_published_and_evicted_ends_no_other(arena, embeddings):
    first = await embeddings.find(wanted(), 1)
    write(first)
    embeddings.lookup(KEY).release()
    assert arena.evict(KEY, "embedded")
    second = await embeddings.find(wanted(), 2)
    assert not second.is_filled
    first.hold.release()
    assert embeddings.stats.num_writing == 1
    write(second)
    second.hold.release()
    assert arena.contains(KEY, "embedded")


async def test_features_of_a_cached_embedding_are_evicted_first(arena, embeddings):
    for key in (MM_HASH, "0" * 64):
        specs = [TensorSpec("uint8", (7 * MIB,))]
        reservation = arena.reserve(7 * MIB)
        tensors = describe(reservation.range, specs)
        arena.publish(reservation, key, Feature("image", key, b"", tensors, MediaSize())).release()
    arena.lookup(MM_HASH).release()
    await published(embeddings)
    arena.reserve(7 * MIB).abandon()
    assert not arena.contains(MM_HASH)
    assert arena.contains("0" * 64)


async def test_fill_that_is_not_written_is_freed_and_the_next_client_writes(arena, embeddings):
    first = await embeddings.find(wanted(), 1)
    first.hold.release()
    second = await embeddings.find(wanted(), 2)
    assert not second.is_filled
    assert second.embedding.tensor.range.generation != first.embedding.tensor.range.generation
    second.hold.release()
    assert not arena.contains(KEY, "embedded")
    assert embeddings.stats.num_dropped == 2
    assert arena.stats().free_bytes == arena.stats().size_bytes


async def test_client_that_writes_an_embedding_is_not_made_to_wait_for_itself(embeddings):
    fill = await embeddings.find(wanted(), 1)
    assert await asyncio.wait_for(embeddings.find(wanted(wait_ms=50_000), 1), 1) is None
    fill.hold.release()


async def test_client_that_does_not_wait_gets_nothing_while_another_writes(embeddings):
    fill = await embeddings.find(wanted(), 1)
    assert await asyncio.wait_for(embeddings.find(wanted(), 2), 1) is None
    assert embeddings.stats.num_waited == 0
    fill.hold.release()


async def test_wait_for_another_client_has_an_end(embeddings):
    fill = await embeddings.find(wanted(), 1)
    assert await asyncio.wait_for(embeddings.find(wanted(wait_ms=20), 2), 5) is None
    assert embeddings.stats.num_waited == 1
    fill.hold.release()


async def waiting(embeddings, *clients):
    tasks = [asyncio.create_task(embeddings.find(wanted(wait_ms=50_000), client)) for client in clients]
    await iterations(3)
    assert not any(task.done() for task in tasks)
    return tasks


async def test_clients_that_wait_get_what_the_first_has_written(embeddings):
    fill = await embeddings.find(wanted(), 1)
    tasks = await waiting(embeddings, 2, 3, 3)
    write(fill)
    fill.hold.release()
    for found in await asyncio.wait_for(asyncio.gather(*tasks), 5):
        assert found.is_filled
        found.hold.release()
    assert embeddings.stats.num_waited == 3


async def test_clients_that_wait_get_it_as_soon_as_it_is_completed(embeddings):
    fill = await embeddings.find(wanted(), 1)
    tasks = await waiting(embeddings, 2, 3)
    write(fill)
    for found in await asyncio.wait_for(asyncio.gather(*tasks), 5):
        assert found.is_filled
        found.hold.release()
    assert embeddings.stats.num_waited == 2
    fill.hold.release()


async def test_one_of_those_that_wait_writes_if_the_first_does_not(embeddings):
    fill = await embeddings.find(wanted(), 1)
    two, three = await waiting(embeddings, 2, 3)
    fill.hold.release()
    second = await asyncio.wait_for(two, 5)
    assert not second.is_filled
    await iterations(3)
    assert not three.done()
    write(second)
    second.hold.release()
    third = await asyncio.wait_for(three, 5)
    assert third.is_filled
    third.hold.release()


async def test_cancelled_wait_leaves_nothing_behind(embeddings):
    fill = await embeddings.find(wanted(), 1)
    two, three = await waiting(embeddings, 2, 3)
    two.cancel()
    fill.hold.release()
    await asyncio.wait([two])
    assert two.cancelled()
    second = await asyncio.wait_for(three, 5)
    assert not second.is_filled
    second.hold.release()


async def test_range_is_freed_when_its_late_writer_has_stopped(arena, embeddings):
    fill = await embeddings.find(wanted(spec=TensorSpec("uint8", (10 * MIB,))), 1)
    with FillWriter.open(fill.embedding.tensor.range, DIRECTORY) as payload:
        payload[:5] = b"still"
        fill.hold.release()
        assert (embeddings.stats.num_dropped, embeddings.stats.num_revoking) == (1, 1)
        with pytest.raises(ArenaFull):
            arena.reserve(10 * MIB)
        assert bytes(payload[:5]) == b"still", "nothing else has been written there"
    await eventually(lambda: embeddings.stats.num_revoking == 0)
    assert not arena.contains(KEY, "embedded")
    arena.reserve(10 * MIB).abandon()


async def test_ranges_that_are_still_written_are_freed_at_the_end(arena, embeddings):
    fill = await embeddings.find(wanted(), 1)
    with FillWriter.open(fill.embedding.tensor.range, DIRECTORY):
        fill.hold.release()
        embeddings.close()
        assert arena.stats().num_reservations == 0
    embeddings.close()


async def test_embedding_that_has_been_copied_meanwhile_is_cached_once(arena, embeddings):
    fill = await embeddings.find(wanted(), 1)
    write(fill)
    reservation = arena.reserve(SPEC.nbytes, "embedded")
    (tensor,) = describe(reservation.range, [SPEC])
    copy = msgspec.structs.replace(FEATURE, embedding=Embedding(KEY, tensor))
    arena.publish(reservation, KEY, copy).release()
    fill.hold.release()
    found = await embeddings.find(wanted(), 2)
    assert found.embedding == copy.embedding
    found.hold.release()
    assert arena.stats().num_entries == 1


async def test_embedding_of_another_shape_is_not_what_is_wanted(arena, embeddings):
    await published(embeddings)
    other = TensorSpec(SPEC.dtype, (50, 128))
    assert await embeddings.find(wanted(spec=other), 2) is None
    assert arena.stats().num_leases == 0


async def test_embedding_larger_than_the_arena_is_not_kept(arena, embeddings):
    assert await embeddings.find(wanted(spec=TensorSpec("uint8", (arena.size_bytes,))), 1) is None
    assert embeddings.stats.num_writing == 0


async def test_full_arena_refuses_and_reserves_nothing(arena, embeddings):
    with arena.reserve(arena.max_payload_bytes), pytest.raises(ArenaFull):
        await embeddings.find(wanted(), 1)
    assert embeddings.stats.num_writing == 0
    await published(embeddings)


@pytest.mark.parametrize(
    "changed",
    [
        {"key": "e" * 63},
        {"key": "E" * 64},
        {"key": "e" * 64 + "\n"},
        {"wait_ms": -1.0},
        {"wait_ms": MAX_EMBEDDING_WAIT_MS + 1},
        {"spec": {"dtype": "float32", "shape": [0, 64]}},
        {"spec": {"dtype": "float31", "shape": [1]}},
        {"feature": {"header": bytes(MAX_HEADER_BYTES + 1)}},
        {"feature": {"tensors": True}},
        {"feature": {"embedding": True}},
    ],
)
def test_malformed_call_is_a_violation(changed):
    (tensor,) = describe(ArenaRange("0" * 32, 4096, 128, 1), [TensorSpec("uint8", (64,))])
    feature = changed.get("feature", {})
    if "tensors" in feature:
        feature = {"tensors": [msgspec.to_builtins(tensor)]}
    elif "embedding" in feature:
        feature = {"embedding": msgspec.to_builtins(Embedding(KEY, tensor))}
    plain = msgspec.to_builtins(wanted(), builtin_types=(bytes,))
    names = ("tag", *FindEmbedding.__struct_fields__)
    fields = dict(zip(names, plain, strict=True))
    good = msgspec.msgpack.encode(list(fields.values()))
    assert decode_to_store(memoryview(good)) == wanted()
    fields |= {**changed, "feature": {**fields["feature"], **feature}}
    with pytest.raises(ProtocolViolation):
        decode_to_store(memoryview(msgspec.msgpack.encode(list(fields.values()))))
