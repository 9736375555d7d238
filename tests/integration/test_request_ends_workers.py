"""A request that ends each engine that it is sent to costs two workers, not all, and no other request."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from gateway_parts import request
from test_continued_answers import Asked

from fake_engine import FakeEngine
from medialane.gateway import open_scope
from medialane.types.errors import RequestEndsWorkers, WorkerLost
from waiting import eventually

#: An engine ends when it gets a prompt with this token.
MARKER = 13
HARMLESS = [1, 2, 3]
MIGRATIONS = "medialane_migrations_total"


class FragileEngine(FakeEngine):
    """`dies_after_s` is how long it takes the marker to end it."""

    def __init__(self, *, dies_after_s=0.0, **settings):
        super().__init__(**settings)
        self.dies_after_s = dies_after_s

    async def generate(self, request, tensors, embeddings=()):
        if MARKER in request.prompt.token_ids:
            await asyncio.sleep(self.dies_after_s)  # time: the subject of the tests
            self.die()
        async for delta in super().generate(request, tensors, embeddings):
            yield delta


@pytest.fixture
def open_parts(open_parts):
    def opened(count, *, dies_after_s=0.0, **config):
        return open_parts(count, worker={"kind": FragileEngine, "dies_after_s": dies_after_s}, **config)

    return opened


async def tokens_of(parts, token_ids, name="r", **params):
    found = []
    with open_scope():
        async with aclosing(parts.gateway.generate(request(name, token_ids, **params), None)) as deltas:
            async for delta in deltas:
                found += delta.completions[0].token_ids
    return found


async def num_dead(workers):
    async def is_dead(worker):
        try:
            await worker.engine.ping(1)
        except WorkerLost:
            return True
        return False

    return sum([await is_dead(worker) for worker in workers])


async def test_request_that_ends_two_workers_is_refused_and_spares_the_third(open_parts, caplog):
    parts, workers = await open_parts(4)
    with pytest.raises(RequestEndsWorkers) as refused:
        await tokens_of(parts, [MARKER], "the-marked-one")
    assert (refused.value.code, refused.value.status) == ("request_ends_workers", 422)
    assert refused.value.retry_after_s is None, "the client is not asked to end two more"
    assert await num_dead(workers) == 2
    assert "request the-marked-one is refused" in caplog.text
    assert parts.count(MIGRATIONS, outcome="refused") == parts.count(MIGRATIONS, outcome="repeated") == 1


async def test_answers_of_workers_that_a_request_ends_go_on(open_parts):
    parts, workers = await open_parts(3)
    expected = await Asked(parts, media=False).task
    others = [Asked(parts, media=False) for _ in range(12)]
    for other in others:
        await other.has(1)
    assert all(worker.engine.num_reading for worker in workers)
    with pytest.raises(RequestEndsWorkers):
        await tokens_of(parts, [MARKER])
    assert [await other.task for other in others] == [expected] * len(others)


async def test_workers_that_are_lost_long_after_the_request_has_arrived_are_not_held_against_it(
    open_parts, monkeypatch
):
    monkeypatch.setattr("medialane.gateway.request.attempts.SUSPICIOUS_S", 0.05)
    parts, workers = await open_parts(5, dies_after_s=0.2, migration_limit=3)
    with pytest.raises(WorkerLost):
        await tokens_of(parts, [MARKER])
    assert await num_dead(workers) == 1 + 3, "the limit alone ends it"


async def test_drained_workers_are_not_held_against_a_request(open_parts):
    parts, workers = await open_parts(3)
    expected = await tokens_of(parts, HARMLESS)
    task = asyncio.create_task(tokens_of(parts, HARMLESS, token_s=0.5))
    for _ in range(2):
        await eventually(lambda: any(worker.engine.num_reading for worker in workers))
        (reader,) = [worker for worker in workers if worker.engine.num_reading]
        await reader.drain(timeout_s=0.0)
        assert not reader.engine.num_reading
    assert await task == expected
    assert parts.count(MIGRATIONS, reason="worker_draining", outcome="repeated") == 2
    assert parts.count(MIGRATIONS) == 2
