"""An image is encoded once per host: gateway, store and workers over real sockets, with engines that write and load
embeddings. What the arena frees is overwritten."""

from __future__ import annotations

import asyncio
import gc
import json
import tempfile
from contextlib import AsyncExitStack, aclosing

import msgspec
import pytest
from gateway_parts import PLACEHOLDER_TOKEN, FakeWorker, Parts, png, prompt, request

from embedding_memory import ENCODER, ENCODER_CARD, ArenaEmbeddings
from fake_engine import FAKE_CARD
from medialane.gateway import GatewayConfig, HandoverConfig, open_scope
from medialane.gateway.intake import ExtractedMedia
from medialane.gateway.records import request_report
from medialane.routing import RoutingConfig
from medialane.types.errors import GenerationFailed, HandoverFailed, StoreUnavailable
from medialane.types.feature import MediaPrompt
from medialane.types.hashing import embedding_key
from medialane.types.media import MediaRef
from waiting import eventually

FAST = {"reconnect_initial_s": 0.01, "reconnect_max_s": 0.05}
#: Longer than any test encodes, for each of an image's six embeddings.
PATIENT = {"encoder_ms_per_token": 1000.0}


class Host:
    """Gateways of one store, each with one worker."""

    def __init__(self, arena, preparers, stack, folder):
        self.arena, self.preparers = arena, preparers
        self._stack, self._folder = stack, folder
        self.memory = ArenaEmbeddings(str(arena.path.parent))
        self.workers, self.gateways, self.seen = [], [], []

    async def add(self, *, card=ENCODER_CARD, transport="auto", encoder_ms_per_token=0.0, **engine):
        worker = await self.add_worker(card=card, **engine)
        return await self.add_gateway(worker, transport=transport, encoder_ms_per_token=encoder_ms_per_token), worker

    async def add_worker(self, *, card=ENCODER_CARD, **engine):
        path = f"{self._folder}/{len(self.workers)}.sock"
        worker = FakeWorker(path, arena=self.arena, card=card, memory=self.memory, **engine)
        self._stack.push_async_callback(worker.close)
        await worker.start()
        self.workers.append(worker)
        self._spy(worker)
        return worker

    async def add_gateway(self, *workers, transport="auto", encoder_ms_per_token=0.0):
        parts = Parts(
            self.arena,
            self.preparers,
            list(workers),
            config=GatewayConfig(stage="features", **FAST),
            handover=HandoverConfig(transport=transport),
            beside=self.gateways[0] if self.gateways else None,
            routing=RoutingConfig(router="round-robin", encoder_ms_per_token=encoder_ms_per_token),
        )
        self.gateways.append(await self._stack.enter_async_context(parts))
        return parts

    def _spy(self, worker):
        generate = worker.engine.generate

        async def spied(sent, *given):
            self.seen.append(sent)
            async with aclosing(generate(sent, *given)) as deltas:
                async for delta in deltas:
                    yield delta

        worker.engine.generate = spied

    @property
    def stats(self):
        return self.gateways[0].store.items.embeddings.stats

    async def evict_media(self):
        """Free, and overwrite, the features of the last request."""
        await self.is_idle()
        for item in self.seen[-1].prompt.media:
            self.arena.evict(item.mm_hash, "processed")
            assert not self.arena.contains(item.mm_hash, "processed")

    async def is_idle(self):
        stats = self.arena.stats()
        await eventually(lambda: self.arena.stats().num_leases == 0, more=lambda: stats)
        await eventually(lambda: self.arena.stats().num_reservations == 0, more=lambda: stats)


@pytest.fixture
async def host(arena, preparers):
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp"))
        host = Host(arena, preparers, stack, folder)
        yield host
        await host.is_idle()
    gc.collect()


async def answer(parts, *images, **params):
    """The tokens for a prompt with images, and what the report says about the embedding of each."""
    with open_scope() as scope:
        media = prompt(*(images or [png()]))
        scope.extracted = ExtractedMedia(media.items, wants_report=True)
        scope.record.received(media.items, model=None, streams=False)
        tokens = await parts.answer(media, **params)
        report = json.loads(request_report(scope.record))
    return tokens, [item.get("embedding") for item in report["items"]]


async def plain(host):
    """The answer for `png()` of a worker that keeps no embeddings."""
    parts, _ = await host.add(card=FAKE_CARD)
    return (await answer(parts))[0]


async def test_new_image_is_encoded_once_and_loaded_from_then_on_by_every_worker(host):
    expected = await plain(host)
    parts, worker = await host.add()
    assert await answer(parts) == (expected, ["encoded"])
    for _ in range(2):
        assert await answer(parts) == (expected, ["loaded"])
    assert worker.num_store_calls == 0, "its gateway has passed all holds"
    other, second = await host.add()
    assert await answer(other) == (expected, ["loaded"])
    assert (worker.engine.num_encoded, worker.engine.num_loaded) == (1, 2)
    assert (second.engine.num_encoded, second.engine.num_loaded) == (0, 1)
    assert [item.tensors for sent in host.seen[-3:] for item in sent.prompt.media] == [()] * 3
    assert parts.count("medialane_embeddings_total", outcome="encoded") == 1
    assert parts.count("medialane_embeddings_total", outcome="loaded") == 2
    assert parts.count("medialane_embedding_loaded_bytes_total") == 2 * 6 * 16 * 4


async def test_image_without_media_in_the_arena_is_answered_by_its_embedding(host):
    expected = await plain(host)
    parts, worker = await host.add()
    await answer(parts)
    num_prepared = host.preparers.stats().num_done
    await host.evict_media()
    assert await answer(parts) == (expected, ["loaded"])
    assert host.preparers.stats().num_done == num_prepared
    assert worker.engine.num_encoded == 1


async def test_one_of_two_images_is_known(host):
    parts, worker = await host.add()
    await answer(parts, png(seed=1))
    tokens, outcomes = await answer(parts, png(seed=1), png(seed=2))
    assert outcomes == ["loaded", "encoded"]
    assert [len(item.tensors) for item in host.seen[-1].prompt.media] == [0, 2]
    assert worker.engine.num_encoded == 2
    assert await answer(parts, png(seed=1), png(seed=2)) == (tokens, ["loaded", "loaded"])


async def test_repeated_image_of_a_request_is_encoded_and_loaded_once(host):
    parts, worker = await host.add()
    tokens, _ = await answer(parts, png(), png())
    assert (worker.engine.num_encoded, host.stats.num_filled) == (1, 1)
    assert await answer(parts, png(), png()) == (tokens, ["loaded", "loaded"])
    assert worker.engine.num_loaded == 1


async def test_two_workers_that_get_a_new_image_at_once_encode_it_once(host):
    expected = await plain(host)
    first, writer = await host.add(encode_s=0.2, **PATIENT)
    second, loader = await host.add(encode_s=0.2, **PATIENT)
    writing = asyncio.create_task(answer(first))
    await eventually(lambda: host.arena.stats().num_reservations == 1)
    assert await answer(second) == (expected, ["loaded"])
    assert host.seen[-1].prompt.media[0].tensors == (), "its media are not read"
    assert await writing == (expected, ["encoded"])
    assert (writer.engine.num_encoded, loader.engine.num_encoded) == (1, 0)


async def test_worker_does_not_wait_for_another_longer_than_it_would_encode(host):
    expected = await plain(host)
    first, _ = await host.add(**PATIENT)
    second, impatient = await host.add(encoder_ms_per_token=1.0)
    stopped = asyncio.Event()
    host.memory.while_writing = stopped.wait
    writing = asyncio.create_task(answer(first))
    await eventually(lambda: host.arena.stats().num_reservations == 1)
    assert await answer(second) == (expected, ["unkept"])
    assert impatient.engine.num_encoded == 1
    stopped.set()
    assert await writing == (expected, ["encoded"])


async def test_worker_that_waits_encodes_itself_when_the_other_one_is_lost(host):
    expected = await plain(host)
    first, writer = await host.add(**PATIENT)
    second, heir = await host.add(**PATIENT)
    stopped = asyncio.Event()
    host.memory.while_writing = stopped.wait
    writing = asyncio.create_task(answer(first))
    await eventually(lambda: host.arena.stats().num_reservations == 1)
    waiting = asyncio.create_task(answer(second))
    await eventually(lambda: host.stats.num_waited == 1)
    host.memory.while_writing = ArenaEmbeddings("").while_writing
    await writer.close()
    assert await waiting == (expected, ["encoded"])
    assert heir.engine.num_encoded == 1
    await asyncio.wait([writing])
    assert writing.exception() is not None


async def test_client_that_leaves_while_its_embedding_is_written_leaves_no_range(host):
    parts, worker = await host.add()
    half = asyncio.Event()
    at_half = asyncio.Event()

    async def stop():
        at_half.set()
        await half.wait()

    host.memory.while_writing = stop
    client = asyncio.create_task(answer(parts))
    await at_half.wait()
    assert host.arena.stats().num_reservations == 1
    client.cancel()
    await asyncio.wait([client])
    await host.is_idle()
    assert host.stats.num_filled == 0
    host.memory.while_writing = ArenaEmbeddings("").while_writing
    assert (await answer(parts))[1] == ["encoded"]
    assert worker.engine.num_encoded == 2


async def test_embedding_is_cached_at_the_first_output_and_held_until_the_end(host):
    parts, _ = await host.add()
    with open_scope():
        prepared = await parts.gateway.prepare(prompt(png()))
        wanted = request("r", prepared.token_ids, max_tokens=1000, token_s=0.01)
        async with aclosing(parts.gateway.generate(wanted, prepared)) as deltas:
            await anext(deltas)
            await eventually(lambda: host.stats.num_filled == 1)
            assert host.arena.stats().num_reservations == 0
            assert (await answer(parts, png()))[1] == ["loaded"]
    with open_scope():
        prepared = await parts.gateway.prepare(prompt(png()))
        wanted = request("r", prepared.token_ids, max_tokens=1000, token_s=0.01)
        async with aclosing(parts.gateway.generate(wanted, prepared)) as deltas:
            await anext(deltas)
            key = embedding_key(mm_hash=prepared.mm_hashes[0], encoder=ENCODER.digest)
            assert not host.arena.evict(key, "embedded"), "the engine may load it again"


def fail_once(worker, where):
    """Have the worker fail to load an embedding: its store does not hold it, or its engine cannot read it. Return what
    has not been raised."""
    errors, generate = [HandoverFailed("it is gone")], worker.engine.generate

    async def failing_generate(*args):
        if errors:
            raise errors.pop()
        async with aclosing(generate(*args)) as deltas:
            async for delta in deltas:
                yield delta

    if where == "store":
        worker.host_arena.errors = errors
    else:
        worker.engine.generate = failing_generate
    return errors


@pytest.mark.parametrize("where", ["store", "engine"])
@pytest.mark.parametrize("is_evicted", [False, True])
async def test_embedding_that_the_worker_cannot_load_is_replaced_by_tensors(host, is_evicted, where):
    """The same hand-over path is used again, with features made anew if they are not in the arena any more."""
    parts, worker = await host.add()
    tokens, _ = await answer(parts)
    if is_evicted:
        await host.evict_media()
    errors = fail_once(worker, where)
    assert (await answer(parts))[0] == tokens
    assert not errors
    assert parts.count("medialane_embeddings_total", outcome="fallback") == 1
    assert parts.count("medialane_transfer_fallbacks_total", path="features/shm", reason="handover_failed") == 0
    assert host.preparers.stats().num_done == 1 + is_evicted


async def test_worker_whose_encoder_is_another_one_gets_tensors_and_refuses_embeddings(host):
    parts, _ = await host.add()
    tokens, _ = await answer(parts)
    other_card = msgspec.structs.replace(FAKE_CARD, encoder=msgspec.structs.replace(ENCODER, digest="f" * 64))
    other, stranger = await host.add(card=other_card)
    assert await answer(other) == (tokens, ["encoded"])
    assert stranger.engine.num_encoded == 1
    assert host.stats.num_filled == 2
    with open_scope():  # the worker's encoder has changed since: the gateway does not know it
        prepared = await parts.gateway.prepare(prompt(png()))
        host.workers[0].engine.card = other_card
        found = await parts.generate(request("r", prepared.token_ids), prepared)
    assert found == tokens
    assert parts.count("medialane_embeddings_total", outcome="fallback") == 1


async def test_worker_without_shared_memory_or_encoder_gets_tensors(host):
    parts, _ = await host.add()
    tokens, _ = await answer(parts)
    for settings in ({"attaches": False}, {"card": FAKE_CARD}, {"transport": "inline"}):
        other, worker = await host.add(**settings)
        assert (await answer(other))[0] == tokens
        assert worker.engine.num_encoded == ("transport" not in settings), settings


async def test_lost_store_costs_no_request(host):
    """It is lost when the worker asks for the embedding."""
    parts, worker = await host.add()
    expected = await plain(host)

    worker.host_arena.embedding_error = StoreUnavailable("the media store is lost")
    assert await answer(parts) == (expected, ["unkept"])
    assert worker.engine.num_encoded == 1


async def test_request_of_a_lost_worker_is_answered_by_another_with_the_embedding(host):
    lost, other = [await host.add_worker() for _ in range(2)]
    parts = await host.add_gateway(lost, other)
    tokens, _ = await answer(parts)
    await host.evict_media()
    lost.engine.die()
    assert [await answer(parts) for _ in range(2)] == [(tokens, ["loaded"])] * 2
    assert parts.count("medialane_migrations_total") == 1
    assert host.stats.num_filled == 1


async def test_gateway_with_some_workers_that_cannot_load_embeddings_sends_them_tensors(host):
    loading, other = await host.add_worker(), await host.add_worker(card=FAKE_CARD)
    parts = await host.add_gateway(loading, other)
    answers = [await answer(parts) for _ in range(6)]
    assert len({tuple(tokens) for tokens, _ in answers}) == 1
    assert (loading.engine.num_encoded, loading.engine.num_loaded, other.engine.num_encoded) == (1, 2, 3)
    assert {len(item.tensors) for sent in host.seen for item in sent.prompt.media} == {0, 2}
    assert parts.count("medialane_embeddings_total", outcome="fallback") >= 2


async def test_url_whose_content_changes_before_its_embedding_is_replaced_is_not_answered_from_both(host):
    url = "http://host/a.png"
    parts, worker = await host.add()
    parts.fetcher.contents[url] = png(seed=1)
    media = MediaPrompt([1, 2, PLACEHOLDER_TOKEN], (MediaRef("image", "image", url=url),))
    with open_scope():
        await parts.answer(media)
    with open_scope():
        prepared = await parts.gateway.prepare(media)
        parts.fetcher.contents[url] = png(seed=2)
        fail_once(worker, "store")
        with pytest.raises(GenerationFailed, match="could not be handed over"):
            await parts.generate(request("r", prepared.token_ids), prepared)
