import asyncio
import logging
from contextlib import aclosing
from pathlib import Path

import msgspec
import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Counter

from fake_engine import FAKE_CARD, FakeEngine, FakeParams
from medialane.arena import Arena, ArenaConfig, describe, layout
from medialane.types.admin import (
    IsSleeping,
    PauseGeneration,
    ReleaseKvCacheMemory,
    ResetMmCache,
    ResetPrefixCache,
    Sleep,
)
from medialane.types.errors import GenerationFailed, HandoverFailed, InvalidFeature, StoreUnavailable, WorkerLost
from medialane.types.feature import Feature, MediaPayload, PlaceholderRange
from medialane.types.kv_blocks import AllBlocksCleared, KvEventBatch
from medialane.types.media import MediaSize
from medialane.types.request import EngineRequest, ExpandedPrompt, UnexpandedPrompt
from medialane.types.tensor import ArenaOffer, InlineTensor, TensorSpec
from medialane.wire import Hello
from medialane.worker import Worker, WorkerConfig
from waiting import eventually, iterations

SPEC = TensorSpec("uint8", (6,))
PLACE = PlaceholderRange(offset=1, length=2)


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def worker(engine):
    worker = make(engine)
    yield worker
    worker.close()


class Host:
    """The store of this host as a worker sees it (`HostArena`)."""

    def __init__(self):
        self.arena = None
        self.error = None

    def watch(self, listener):
        self._listener = listener

    def found(self, arena, **changed):
        self.arena = arena
        self.offer(msgspec.structs.replace(ArenaOffer(arena.id, arena.nonce), **changed))

    def offer(self, offer):
        self._listener(offer)

    async def hold(self, ranges, *, passed_with=None):
        if self.error is not None:
            raise self.error
        (found,) = ranges
        if (pin := self.arena.share(found)) is None:
            raise HandoverFailed("not held any more")
        return pin


@pytest.fixture
def host():
    return Host()


class Mapped:
    """What a worker has reported about its arena."""

    def __init__(self, worker):
        self.arenas = []
        self.stop = worker.watch_arena(self.arenas.append)


@pytest.fixture
async def sharing(engine, host):
    """A worker that watches the store of its host, and what it reports."""
    worker = make(engine, host, ping_interval_s=60.0)
    watching = asyncio.create_task(worker.watch())
    await eventually(lambda: engine.num_pings == 1)
    yield worker
    watching.cancel()
    worker.close()


def make(engine, host=None, **config):
    return Worker(engine, WorkerConfig(**config), arena_directory="/dev/shm", host_arena=host)


def hello(processor=FAKE_CARD.processor):
    return Hello(gateway_id="g", processor=processor)


async def shared(worker, host, arena):
    """Wait until the worker and its engine have mapped `arena`."""
    mapped = Mapped(worker)
    host.found(arena)
    await eventually(lambda: mapped.arenas[-1] == arena.id)
    mapped.stop()


def feature(tensor, place=PLACE):
    return MediaPayload("image", "h", b"", (tensor,), MediaSize(), place)


def inline(data=b"abcdef"):
    return feature(InlineTensor(SPEC, data))


def request(*features, **params):
    params = {"max_tokens": 3} | params
    return EngineRequest("r", ExpandedPrompt([1, 2, 3, 4], features), msgspec.json.encode(FakeParams(**params)))


def is_mapped(arena):
    """Whether a worker of this process, where the arena's owner is as well, has mapped the arena: workers only read."""
    return any(arena.id in line and "r--s" in line for line in Path("/proc/self/maps").read_text().splitlines())


async def answer(worker, sent):
    async with aclosing(worker.run(sent)) as deltas:
        return [token async for d in deltas for token in d.completions[0].token_ids]


def put(arena, data):
    """A tensor in the arena, and its pin."""
    reservation = arena.reserve(layout([SPEC])[1])
    (tensor,) = describe(reservation.range, [SPEC])
    arena.view.tensor(tensor, writable=True)[:] = data
    return tensor, arena.publish(reservation, "k", Feature("image", "k", b"", (tensor,), MediaSize()))


async def test_gateway_receives_the_model_card(worker, engine):
    welcome = await worker.register(hello())
    assert welcome.card == engine.card
    assert welcome.worker_id == worker.worker_id


async def test_worker_ids_are_unique(engine):
    assert make(engine).worker_id != make(engine).worker_id


async def test_arena_of_the_host_is_mapped_by_worker_and_engine(arena, host, sharing, engine):
    reported = Mapped(sharing)
    host.found(arena)
    await eventually(lambda: reported.arenas == [None, arena.id])
    assert engine.arenas == [arena.id]
    assert is_mapped(arena)
    assert Mapped(sharing).arenas == [arena.id], "a gateway that connects later"


async def test_arena_that_the_engine_cannot_map_is_not_reported(arena, host, sharing, engine, caplog):
    engine.attaches = False
    reported = Mapped(sharing)
    for _ in range(2):  # the store's connection is lost and restored
        num_pings = engine.num_pings
        host.found(arena)
        await eventually(lambda before=num_pings: engine.num_pings > before)
    await eventually(lambda: "media arrive in messages" in caplog.text)
    await iterations(3)
    assert reported.arenas == [None]
    assert engine.arenas == [arena.id], "asked once"
    assert caplog.text.count("media arrive in messages") == 1


@pytest.mark.parametrize("changed", [{"id": "f" * 32}, {"nonce": b"n" * 16}])
async def test_arena_in_another_shared_memory_is_not_reported(arena, host, sharing, engine, caplog, changed):
    reported = Mapped(sharing)
    host.found(arena, **changed)
    await eventually(lambda: "media arrive in messages" in caplog.text)
    assert reported.arenas == [None]
    tensor, pin = put(arena, b"abcdef")
    with pytest.raises(HandoverFailed):
        await answer(sharing, request(feature(tensor)))
    pin.release()


async def test_worker_without_a_store_takes_media_in_messages_only(arena, worker):
    tensor, pin = put(arena, b"abcdef")
    with pytest.raises(HandoverFailed, match="no store on its host"):
        await answer(worker, request(feature(tensor)))
    assert await answer(worker, request(inline()))
    assert Mapped(worker).arenas == [None]
    pin.release()


async def test_different_processor_settings_are_reported(worker, caplog):
    caplog.set_level(logging.WARNING)
    await worker.register(hello(processor={"model": "other", "dtype": "x"}))
    assert ["model is other there and fake here" in m for m in caplog.messages] == [False, True]
    assert "dtype is x there and None here" in caplog.messages[0]


async def test_inline_and_descriptor_features_give_the_same_output(arena, host, sharing):
    await shared(sharing, host, arena)
    tensor, pin = put(arena, b"abcdef")
    expected = await answer(sharing, request(inline()))
    assert await answer(sharing, request(feature(tensor))) == expected
    assert await answer(sharing, request(inline(b"abcdeg"))) != expected
    pin.release()


async def test_unexpanded_prompt_items_are_read_like_features(arena, host, sharing):
    await shared(sharing, host, arena)
    tensor, pin = put(arena, b"abcdef")
    item = MediaPayload("image", "h", b"", (tensor,))
    by_descriptor = EngineRequest("r", UnexpandedPrompt([1, 2], (item,)), msgspec.json.encode(FakeParams(2)))
    by_value = msgspec.structs.replace(item, tensors=(InlineTensor(tensor.spec, b"abcdef"),))
    expected = msgspec.structs.replace(by_descriptor, prompt=UnexpandedPrompt([1, 2], (by_value,)))
    assert await answer(sharing, by_descriptor) == await answer(sharing, expected)
    pin.release()


async def test_descriptor_of_an_unmapped_arena_fails_the_hand_over(arena, host, sharing):
    host.arena = arena  # held there, but not mapped here
    tensor, pin = put(arena, b"abcdef")
    with pytest.raises(HandoverFailed, match="not mapped"):
        await answer(sharing, request(feature(tensor)))
    pin.release()


async def test_descriptor_of_an_entry_that_is_no_longer_held_fails_the_hand_over(arena, host, sharing, engine):
    await shared(sharing, host, arena)
    tensor, pin = put(arena, b"abcdef")
    pin.release()
    with pytest.raises(HandoverFailed, match="not held"):
        await answer(sharing, request(feature(tensor)))
    assert (engine.num_requests, engine.num_reading) == (0, 0)


async def test_lost_store_fails_the_hand_over_so_that_another_path_is_tried(arena, host, sharing):
    await shared(sharing, host, arena)
    tensor, pin = put(arena, b"abcdef")
    host.error = StoreUnavailable("the store is lost")
    with pytest.raises(HandoverFailed, match="the store is lost"):
        await answer(sharing, request(feature(tensor)))
    pin.release()


async def test_worker_holds_what_the_engine_reads_until_the_engine_has_released(arena, host, engine):
    engine.release_s = 0.03
    sharing = make(engine, host, ping_interval_s=60.0)
    watching = asyncio.create_task(sharing.watch())
    await shared(sharing, host, arena)
    tensor, pin = put(arena, b"abcdef")
    deltas = sharing.run(request(feature(tensor), max_tokens=100))
    await anext(deltas)
    pin.release()  # the gateway's
    assert arena.stats().num_leases == 1
    closing = asyncio.create_task(deltas.aclose())
    await iterations(3)
    assert (engine.num_reading, arena.stats().num_leases) == (1, 1)
    await closing
    assert (engine.num_reading, arena.stats().num_leases) == (0, 0)
    watching.cancel()
    sharing.close()


@pytest.mark.parametrize("place", [PLACE, PlaceholderRange(offset=3, length=9)])
async def test_hold_ends_with_a_request_that_fails(arena, host, sharing, engine, place):
    await shared(sharing, host, arena)
    tensor, pin = put(arena, b"abcdef")
    if place is PLACE:
        engine.die(GenerationFailed("no"))
    with pytest.raises((GenerationFailed, InvalidFeature)):
        await answer(sharing, request(feature(tensor, place)))
    pin.release()
    assert arena.stats().num_leases == 0
    engine.recover()


async def test_request_without_descriptors_needs_no_store(arena, host, sharing):
    host.error = StoreUnavailable("the store is lost")
    assert await answer(sharing, request(inline()))
    assert await answer(sharing, request())


async def test_malformed_feature_does_not_affect_the_next_request(worker):
    beyond = feature(InlineTensor(SPEC, b"abcdef"), PlaceholderRange(offset=3, length=9))
    with pytest.raises(InvalidFeature):
        await answer(worker, request(beyond))
    assert len(await answer(worker, request(inline()))) == 3


async def test_closing_an_output_waits_until_the_engine_has_released():
    engine = FakeEngine(release_s=0.03)
    worker = make(engine)
    deltas = worker.run(request(inline(), max_tokens=100))
    await anext(deltas)
    assert worker.loads()[0].num_running == 1
    await deltas.aclose()
    assert worker.loads()[0].num_running == 0


async def test_health_watch_continues_while_the_engine_responds(engine):
    watching = asyncio.create_task(make(engine, ping_interval_s=0.001).watch())
    await eventually(lambda: engine.num_pings > 3)
    assert not watching.done()
    watching.cancel()


async def test_dead_engine_ends_the_health_watch_immediately(engine):
    engine.die()
    with pytest.raises(WorkerLost):
        await make(engine, ping_interval_s=60.0).watch()
    assert engine.num_pings == 1


async def test_one_missed_ping_is_tolerated_and_two_are_not(engine):
    worker = make(engine, ping_interval_s=0.05)
    engine.die(GenerationFailed("silent"))
    watching = asyncio.create_task(worker.watch())
    await iterations(3)
    assert engine.num_pings == 1
    engine.recover()
    await eventually(lambda: engine.num_pings >= 3)
    assert not watching.done()
    engine.die(GenerationFailed("silent"))
    with pytest.raises(WorkerLost):
        await watching


async def test_failed_request_triggers_an_immediate_health_check(engine):
    worker = make(engine, ping_interval_s=60.0)
    watching = asyncio.create_task(worker.watch())
    await eventually(lambda: engine.num_pings == 1)
    engine.die()
    with pytest.raises(WorkerLost):
        await answer(worker, request())
    async with asyncio.timeout(2):
        with pytest.raises(WorkerLost):
            await watching


async def test_arena_of_a_lost_store_is_unmapped_in_worker_and_engine(arena, host, sharing, engine):
    await shared(sharing, host, arena)
    reported = Mapped(sharing)
    host.offer(None)
    assert reported.arenas == [arena.id, None], "gateways stop sending descriptors at once"
    assert not is_mapped(arena)
    await eventually(lambda: engine.arenas == [])


async def test_new_store_replaces_the_arena_of_the_earlier_one(arena, host, sharing, engine):
    await shared(sharing, host, arena)
    reported = Mapped(sharing)
    other = Arena.create(ArenaConfig(size_bytes=16 << 20))
    host.found(other)
    await eventually(lambda: reported.arenas == [arena.id, None, other.id])
    assert engine.arenas == [other.id]
    assert not is_mapped(arena)
    host.offer(None)
    other.close()


async def test_reconnected_store_keeps_its_arena_mapped(arena, host, sharing, engine):
    await shared(sharing, host, arena)
    reported = Mapped(sharing)
    host.offer(None)
    host.found(arena)
    await eventually(lambda: reported.arenas == [arena.id, None, arena.id])
    assert arena.id in engine.arenas
    tensor, pin = put(arena, b"abcdef")
    assert await answer(sharing, request(feature(tensor)))
    pin.release()


async def test_store_replaced_while_its_arena_is_being_mapped_leaves_no_mapping(arena, host, sharing, engine):
    attach, at_engine, go_on = engine.attach_arena, asyncio.Event(), asyncio.Event()

    async def slow(*args):
        at_engine.set()
        await go_on.wait()
        return await attach(*args)

    engine.attach_arena = slow
    host.found(arena)
    await at_engine.wait()
    reported, other = Mapped(sharing), Arena.create(ArenaConfig(size_bytes=16 << 20))
    host.found(other)
    go_on.set()
    await eventually(lambda: reported.arenas == [None, other.id])
    await eventually(lambda: engine.arenas == [other.id])
    assert not is_mapped(arena)
    host.offer(None)
    other.close()


async def test_running_request_reads_on_when_the_store_is_lost(arena, host, sharing):
    await shared(sharing, host, arena)
    tensor, pin = put(arena, b"abcdef")
    expected = await answer(sharing, request(inline()))
    deltas = sharing.run(request(feature(tensor)))
    tokens = [(await anext(deltas)).completions[0].token_ids[0]]
    host.offer(None)
    async for delta in deltas:
        tokens += delta.completions[0].token_ids
    assert tokens == expected
    pin.release()


async def test_engine_unmaps_the_arena_of_a_lost_store_only_when_no_request_reads_it(arena, host, sharing, engine):
    """vLLM's requests are reference cycles: what one has read is unmapped only if `detach_arena` follows its end."""
    await shared(sharing, host, arena)
    tensor, pin = put(arena, b"abcdef")
    ends_first, ends_last = [sharing.run(request(feature(tensor), max_tokens=9)) for _ in range(2)]
    await anext(ends_first)
    await anext(ends_last)
    num_pings = engine.num_pings
    host.offer(None)
    await eventually(lambda: engine.num_pings > num_pings)
    await ends_first.aclose()
    await iterations(50)
    assert engine.arenas == [arena.id]
    await ends_last.aclose()
    await eventually(lambda: engine.arenas == [])
    pin.release()


async def test_engine_keeps_the_arena_of_a_connected_store_when_its_last_reader_ends(arena, host, sharing, engine):
    await shared(sharing, host, arena)
    tensor, pin = put(arena, b"abcdef")
    num_pings = engine.num_pings
    await answer(sharing, request(feature(tensor)))
    await iterations(50)
    assert (engine.arenas, engine.num_pings) == ([arena.id], num_pings)
    pin.release()


class Known:
    """A gateway's view of rank 0."""

    def __init__(self, worker):
        self.held = set(worker.held_blocks()[0])
        self.snapshots = 0
        self.stop = worker.watch_blocks(self.changed)

    def changed(self, change):
        stored = set(np.frombuffer(change.stored, "<u8").tolist())
        removed = set(np.frombuffer(change.removed, "<u8").tolist())
        self.held = stored if change.snapshot else self.held - removed | stored
        self.snapshots += change.snapshot


@pytest.fixture
async def known(worker):
    long = EngineRequest("r", ExpandedPrompt(list(range(64))), msgspec.json.encode(FakeParams(max_tokens=1)))
    await answer(worker, long)
    known = Known(worker)
    assert known.held
    return known


@pytest.mark.parametrize("call", [ResetPrefixCache(), Sleep(), PauseGeneration(), ReleaseKvCacheMemory()])
async def test_gateways_are_notified_of_cleared_caches_before_the_next_step(worker, known, call):
    await worker.administer(call)
    assert (known.held, known.snapshots) == (set(), 1)


@pytest.mark.parametrize("call", [IsSleeping(), ResetMmCache(), Sleep(0), PauseGeneration("keep")])
async def test_calls_that_clear_no_cache_keep_the_blocks(worker, known, call):
    held = set(known.held)
    await worker.administer(call)
    assert (known.held, known.snapshots) == (held, 0)


async def test_cache_in_use_keeps_its_blocks(worker, engine, known):
    async def refuses(_call):
        return False

    engine.administer = refuses
    assert await worker.administer(ResetPrefixCache()) is False
    assert known.held


async def test_blocks_stored_after_the_reported_reset_stay(worker, engine, known):
    async def tells(_call):
        engine.listener(KvEventBatch(0, [AllBlocksCleared()], 0.0))
        await answer(worker, request(max_tokens=1))
        long = EngineRequest("r2", ExpandedPrompt(list(range(100, 164))), msgspec.json.encode(FakeParams(max_tokens=1)))
        await answer(worker, long)
        return True

    engine.administer = tells
    await worker.administer(ResetPrefixCache())
    assert known.held == set(worker.held_blocks()[0]) != set()


async def test_engine_error_is_raised_by_the_call(worker, engine):
    engine.die(GenerationFailed("the engine failed"))
    with pytest.raises(GenerationFailed):
        await worker.administer(Sleep())


async def test_worker_metrics_are_those_of_the_process():
    registry = CollectorRegistry()
    worker = Worker(FakeEngine(), WorkerConfig(), arena_directory="/dev/shm", registry=registry)
    Counter("vllm:a", "A", registry=registry).inc(3)
    first, second = worker.metrics(), worker.metrics()
    assert first() == second() != first()
    worker.close()
