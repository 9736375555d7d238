import asyncio
import logging
from contextlib import aclosing
from pathlib import Path

import msgspec
import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Counter

from medialane.arena import Arena, ArenaConfig, describe, layout
from medialane.core.admin import (
    IsSleeping,
    PauseGeneration,
    ReleaseKvCacheMemory,
    ResetMmCache,
    ResetPrefixCache,
    Sleep,
)
from medialane.core.errors import GenerationFailed, HandoverFailed, InvalidFeature, WorkerLost
from medialane.core.feature import Feature, MediaPayload, PlaceholderRange
from medialane.core.kv_events import AllBlocksCleared, KvEventBatch
from medialane.core.media import MediaSize
from medialane.core.request import EngineRequest, ExpandedPrompt, SourcePrompt
from medialane.core.tensor import InlineTensor, TensorSpec
from medialane.rpc import ArenaOffer, Hello
from medialane.worker import FakeEngine, FakeParams, Worker, WorkerConfig
from medialane.worker.fake_engine import FAKE_CARD
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


@pytest.fixture
def arena():
    arena = Arena.create(ArenaConfig(size_bytes=16 << 20))
    yield arena
    arena.close()


def make(engine, **config):
    return Worker(engine, WorkerConfig(**config), arena_directory="/dev/shm")


def hello(arena=None, processor=FAKE_CARD.processor):
    offer = None if arena is None else ArenaOffer(arena.id, arena.nonce)
    return Hello(gateway_id="g", arena=offer, processor=processor)


def feature(tensor, place=PLACE):
    return MediaPayload("image", "h", b"", (tensor,), MediaSize(), place)


def inline(data=b"abcdef"):
    return feature(InlineTensor(SPEC, data))


def request(*features, **params):
    params = {"max_tokens": 3} | params
    return EngineRequest("r", ExpandedPrompt([1, 2, 3, 4], features), msgspec.json.encode(FakeParams(**params)))


def mapped():
    return Path("/proc/self/maps").read_text()


async def answer(worker, sent):
    async with aclosing(worker.run(sent)) as deltas:
        return [token async for d in deltas for token in d.completions[0].token_ids]


def put(arena, data):
    """A tensor in the arena, and its lease."""
    reservation = arena.reserve(layout([SPEC])[1])
    (tensor,) = describe(reservation.range, [SPEC])
    arena.view.tensor(tensor, writable=True)[:] = data
    return tensor, arena.publish(reservation, "k", Feature("image", "k", b"", (tensor,), MediaSize()))


async def test_gateway_receives_the_model_card(worker, engine):
    welcome = await worker.register(hello())
    assert welcome.card == engine.card
    assert welcome.worker_id == worker.worker_id
    assert not welcome.shm


async def test_worker_ids_are_unique(engine):
    assert make(engine).worker_id != make(engine).worker_id


async def test_shared_memory_needs_both_processes(arena, worker, engine):
    assert (await worker.register(hello(arena))).shm
    assert engine.arenas == [arena.id]
    deaf = make(FakeEngine(attaches=False))
    assert not (await deaf.register(hello(arena))).shm
    deaf.close()


async def test_arena_of_another_host_is_not_shared(worker, engine):
    offer = ArenaOffer("f" * 32, b"n" * 16)
    assert not (await worker.register(Hello(gateway_id="g", arena=offer))).shm
    assert engine.arenas == []


async def test_different_processor_settings_are_reported(worker, caplog):
    caplog.set_level(logging.WARNING)
    await worker.register(hello(processor={"model": "other", "dtype": "x"}))
    assert ["model is other there and fake here" in m for m in caplog.messages] == [False, True]
    assert "dtype is x there and None here" in caplog.messages[0]


async def test_inline_and_descriptor_features_give_the_same_output(arena, worker):
    await worker.register(hello(arena))
    tensor, lease = put(arena, b"abcdef")
    expected = await answer(worker, request(inline()))
    assert await answer(worker, request(feature(tensor))) == expected
    assert await answer(worker, request(inline(b"abcdeg"))) != expected
    lease.release()


async def test_source_prompt_items_are_read_like_features(arena, worker):
    await worker.register(hello(arena))
    tensor, lease = put(arena, b"abcdef")
    item = MediaPayload("image", "h", b"", (tensor,))
    by_descriptor = EngineRequest("r", SourcePrompt([1, 2], (item,)), msgspec.json.encode(FakeParams(2)))
    by_value = msgspec.structs.replace(item, tensors=(InlineTensor(tensor.spec, b"abcdef"),))
    expected = msgspec.structs.replace(by_descriptor, prompt=SourcePrompt([1, 2], (by_value,)))
    assert await answer(worker, by_descriptor) == await answer(worker, expected)
    lease.release()


async def test_descriptor_of_an_unmapped_arena_fails_the_hand_over(arena, worker):
    tensor, lease = put(arena, b"abcdef")
    with pytest.raises(HandoverFailed):
        await answer(worker, request(feature(tensor)))
    lease.release()


async def test_descriptor_of_a_freed_entry_fails_the_hand_over(arena, worker, engine):
    await worker.register(hello(arena))
    tensor, lease = put(arena, b"abcdef")
    lease.release()
    arena.evict("k")
    with pytest.raises(HandoverFailed):
        await answer(worker, request(feature(tensor)))
    assert engine.num_reading == 0


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


async def test_arena_of_a_departed_gateway_is_unmapped_in_worker_and_engine(engine):
    worker = make(engine, ping_interval_s=60.0)
    gone = Arena.create(ArenaConfig(size_bytes=16 << 20))
    await worker.register(hello(gone))
    gone.close()
    assert gone.id in mapped()
    watching = asyncio.create_task(worker.watch())
    await eventually(lambda: engine.num_pings == 1)
    worker.left(hello(gone))
    assert gone.id not in mapped()
    await eventually(lambda: engine.arenas == [])
    watching.cancel()


async def test_immediately_reconnecting_gateway_keeps_its_arena(engine, arena):
    worker = make(engine, ping_interval_s=60.0)
    await worker.register(hello(arena))
    worker.left(hello(arena))
    assert (await worker.register(hello(arena))).shm
    watching = asyncio.create_task(worker.watch())
    await eventually(lambda: engine.num_pings == 1)
    assert arena.id in engine.arenas
    tensor, lease = put(arena, b"abcdef")
    assert await answer(worker, request(feature(tensor)))
    lease.release()
    watching.cancel()
    worker.close()


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
