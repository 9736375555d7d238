"""A request whose worker is lost before its first token is answered by another worker."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from functools import partial

import pytest
from gateway_parts import png, prompt, request

from medialane.gateway import ShmTransport, WorkerLink, health_of, open_scope
from medialane.types.errors import NoWorkerReady, RequestEndsWorkers, WorkerLost
from medialane.worker import WorkerConfig
from waiting import eventually

WATCHED = WorkerConfig(ping_interval_s=0.05, stall_timeout_s=0.4)
FAST = {"reconnect_initial_s": 0.01, "reconnect_max_s": 0.05}


@pytest.fixture
def open_parts(open_parts):
    return partial(open_parts, worker={"config": WATCHED})


def losing(tried, number):
    """Links: the first `number` that are used are lost before the request is sent; `tried` gets their names."""

    class LosingLink(WorkerLink):
        def submit(self, wanted):
            tried.append(self.name)
            if len(tried) <= number:
                raise WorkerLost("the connection was lost before the request was sent")
            return super().submit(wanted)

    return LosingLink


async def reader_of(workers, others=()):
    """The worker that has a request, none of `others`."""

    def found():
        return [worker for worker in workers if worker not in others and worker.engine.num_reading]

    await eventually(found)
    return found()[0]


async def image_answer(parts, attempts=None, **params):
    """Return the answer; add its request's attempts to `attempts`."""
    with open_scope() as scope:
        try:
            return await parts.answer(prompt(png()), **params)
        finally:
            if attempts is not None:
                attempts += scope.record.attempts


@pytest.mark.parametrize("stage", ["features", "url"])
@pytest.mark.parametrize("loss", ["connection", "engine"])
async def test_request_without_a_token_is_answered_by_another_worker(open_parts, stage, loss):
    parts, workers = await open_parts(2, stage=stage)
    expected = await image_answer(parts)
    attempts = []
    task = asyncio.create_task(image_answer(parts, attempts, token_s=0.3))
    first = await reader_of(workers)
    if loss == "engine":
        first.engine.die()
    else:
        first.drop_connections()
    assert await task == expected
    assert parts.count("medialane_migrations_total") == 1
    assert [attempt.is_sent for attempt in attempts] == [True, True], "both were sent, the first in vain"
    assert {attempt.worker for attempt in attempts} == {worker.address for worker in workers}
    await eventually(lambda: parts.num_held == 0)


@pytest.mark.parametrize("stage", ["features", "url"])
async def test_choice_of_a_worker_that_is_lost_before_the_request_is_sent_is_recorded_as_unsent(open_parts, stage):
    tried, attempts = [], []
    parts, _ = await open_parts(2, parts={"link": losing(tried, 1)}, stage=stage)
    await image_answer(parts, attempts)
    assert [(each.worker, each.is_sent) for each in attempts] == [(tried[0], False), (tried[1], True)]
    assert parts.router.num_unsent == 1


@pytest.mark.parametrize("stage", ["features", "url"])
async def test_choice_of_a_request_that_is_cancelled_before_it_is_sent_counts_as_unsent(open_parts, stage):
    begun = asyncio.Event()

    class StuckTransport(ShmTransport):
        async def publish(self, *_):
            begun.set()
            await asyncio.Event().wait()

    parts, _ = await open_parts(2, parts={"shm": StuckTransport}, stage=stage)
    task = asyncio.create_task(image_answer(parts))
    await begun.wait()
    task.cancel()
    await asyncio.wait([task])
    router = parts.router
    assert router.num_unsent == 1
    assert router.mean_sequences == 0


async def test_request_with_a_token_that_cannot_go_on_is_not_repeated(open_parts):
    parts, workers = await open_parts(2)
    with open_scope():
        wanted = request("r", [1, 2, 3], max_tokens=100, token_s=0.05)
        async with aclosing(parts.gateway.generate(wanted, None)) as deltas:
            await anext(deltas)
            (await reader_of(workers)).drop_connections()
            with pytest.raises(WorkerLost):
                async for _ in deltas:
                    pass
    assert (
        parts.count("medialane_migrations_total")
        == parts.count("medialane_migrations_total", outcome="impossible")
        == 1
    )


async def test_lost_error_is_reported_if_no_other_worker_is_ready_in_time(open_parts):
    parts, workers = await open_parts(1, migration_timeout_s=0.3)
    task = asyncio.create_task(image_answer(parts, token_s=0.3))
    await (await reader_of(workers)).close()
    with pytest.raises(WorkerLost):
        await task


async def test_request_waits_for_its_worker_to_come_back_if_there_is_no_other(open_parts):
    parts, workers = await open_parts(1)
    expected = await image_answer(parts)
    task = asyncio.create_task(image_answer(parts, token_s=0.3))
    worker = await reader_of(workers)
    await worker.close()
    await worker.start()
    assert await task == expected


async def test_request_moves_no_more_often_than_the_limit(open_parts):
    tried = []
    parts, _ = await open_parts(5, parts={"link": losing(tried, 5)}, migration_limit=3)
    with pytest.raises(WorkerLost), open_scope():
        await parts.generate(request("r", [1, 2, 3]), None)
    assert len(tried) == len(set(tried)) == 1 + 3


async def test_request_that_ends_every_engine_reaches_two_workers_once_each(open_parts, caplog):
    parts, workers = await open_parts(5)
    for worker in workers:
        worker.engine.die()
    with pytest.raises(RequestEndsWorkers), open_scope() as scope:
        await parts.generate(request("ends-workers", [1, 2, 3]), None)
    assert "request ends-workers is refused" in caplog.text
    tried = [attempt.worker for attempt in scope.record.attempts]
    assert len(tried) == len(set(tried)) == 2


async def test_request_without_a_token_is_answered_by_another_worker_if_its_engine_is_stalled(open_parts):
    parts, workers = await open_parts(2)
    expected = await image_answer(parts)
    task = asyncio.create_task(image_answer(parts, token_s=0.3))
    first = await reader_of(workers)
    first.engine.stall()
    assert await task == expected
    assert parts.count("medialane_migrations_total") == 1
    assert health_of(parts.links).response()[0] == 200
    assert "1 of 2 workers is stalled (see its log)" in health_of(parts.links).problems
    num_requests = first.engine.num_requests
    assert [await image_answer(parts) for _ in range(3)] == [expected] * 3
    assert first.engine.num_requests == num_requests, "new requests go to the other worker"
    assert first.engine.num_reading == 1, "its engine has not released the first attempt yet"
    first.engine.resume()
    await eventually(lambda: first.engine.num_reading == 0, "late outputs are dropped")
    await eventually(lambda: health_of(parts.links).response() == (200, b""), "it returns")


async def test_request_with_a_token_that_cannot_go_on_waits_for_a_stalled_engine(open_parts):
    parts, workers = await open_parts(2)
    with open_scope():
        wanted = request("r", [1, 2, 3], max_tokens=5, token_s=0.05)
        async with aclosing(parts.gateway.generate(wanted, None)) as deltas:
            found = [await anext(deltas)]
            first = await reader_of(workers)
            first.engine.stall()
            await eventually(lambda: health_of(parts.links).problems)
            first.engine.resume()
            found += [delta async for delta in deltas]
    assert sum(len(delta.completions[0].token_ids) for delta in found) == 5
    assert parts.count("medialane_migrations_total") == 0


async def test_request_waits_if_the_only_worker_is_stalled_and_new_ones_are_refused(open_parts):
    parts, (worker,) = await open_parts(1)
    expected = await image_answer(parts)
    task = asyncio.create_task(image_answer(parts, token_s=0.3))
    await reader_of([worker])
    worker.engine.stall()
    await eventually(lambda: parts.links.num_ready == 0)
    assert health_of(parts.links).response()[0] == 503
    with pytest.raises(NoWorkerReady), open_scope():
        await parts.generate(request("r", [1, 2, 3]), None)
    assert not task.done()
    worker.engine.resume()
    assert await task == expected
    await eventually(lambda: parts.links.num_ready == 1)


async def test_request_of_a_stalled_worker_moves_as_soon_as_another_is_ready(open_parts):
    parts, workers = await open_parts(2)
    expected = await image_answer(parts)
    task = asyncio.create_task(image_answer(parts, token_s=0.3))
    first = await reader_of(workers)
    (other,) = set(workers) - {first}
    other.engine.stall()
    first.engine.stall()
    await eventually(lambda: parts.links.num_ready == 0)
    assert not task.done()
    other.engine.resume()
    assert await task == expected
    first.engine.resume()


async def test_request_whose_links_are_cut_twice_is_not_held_to_end_workers(open_parts):
    parts, workers = await open_parts(3)
    expected = await image_answer(parts)
    task = asyncio.create_task(image_answer(parts, token_s=0.3))
    first = await reader_of(workers)
    first.drop_connections()
    (await reader_of(workers, [first])).drop_connections()
    assert await task == expected
    assert not parts.count("medialane_migrations_total", outcome="refused")
