"""An answer that has begun goes on at another worker, without a token twice or missing."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from functools import partial

import pytest
from gateway_parts import png, prompt, request

from fake_engine import FakeContinuable
from medialane.gateway import open_scope
from medialane.types.errors import WorkerLost
from medialane.worker import WorkerConfig
from waiting import eventually

WATCHED = WorkerConfig(ping_interval_s=0.05, stall_timeout_s=0.4)
NUM_TOKENS = 12
TOKEN_S = 0.02
MIGRATIONS = "medialane_migrations_total"


class Asked:
    """One streamed answer; `tokens` are those delivered."""

    def __init__(self, parts, *, media=True, obstacle=""):
        self.tokens, self.finishes = [], []
        self._parts, self._media, self._obstacle = parts, media, obstacle
        self.task = asyncio.create_task(self._read())

    async def has(self, number):
        await eventually(lambda: len(self.tokens) >= number, f"{number} tokens")

    async def _read(self):
        with open_scope():
            prepared = await self._parts.gateway.prepare(prompt(png())) if self._media else None
            ids = prepared.token_ids if prepared else [1, 2, 3]
            wanted = request("r", ids, max_tokens=NUM_TOKENS, token_s=TOKEN_S)
            continuable = FakeContinuable(wanted.sampling_params, self._obstacle)
            async with aclosing(self._parts.gateway.generate(wanted, prepared, continuable)) as deltas:
                async for delta in deltas:
                    self.tokens += delta.completions[0].token_ids
                    self.finishes.append(delta.finished)
        return self.tokens


@pytest.fixture
def open_parts(open_parts):
    return partial(open_parts, worker={"config": WATCHED})


def reader(workers):
    (worker,) = [worker for worker in workers if worker.engine.num_reading]
    return worker


def lose(worker, loss):
    match loss:
        case "connection":
            worker.drop_connections()
        case "engine":
            worker.engine.die()
        case "stall":
            worker.engine.stall()


@pytest.mark.parametrize("stage", ["features", "decoded", "url"])
@pytest.mark.parametrize("loss", ["connection", "engine", "stall"])
async def test_answer_goes_on_without_a_token_twice_or_missing(open_parts, loss, stage):
    parts, workers = await open_parts(2, stage=stage)
    expected = await Asked(parts).task
    prepared_before = parts.count("medialane_cache_lookups_total", outcome="miss")
    asked = Asked(parts)
    await asked.has(4)
    lost = reader(workers)
    lose(lost, loss)
    assert await asked.task == expected
    assert asked.finishes == [False] * (len(asked.finishes) - 1) + [True]
    assert parts.count(MIGRATIONS, outcome="continued") == parts.count(MIGRATIONS) == 1
    assert parts.count("medialane_cache_lookups_total", outcome="miss") == prepared_before, "its media were still held"
    lost.engine.resume()
    await eventually(lambda: parts.num_held == 0)


async def test_answer_goes_on_as_often_as_the_limit_allows_and_no_more(open_parts):
    parts, workers = await open_parts(3, migration_limit=2)
    expected = await Asked(parts, media=False).task
    asked = Asked(parts, media=False)
    for number in (2, 5):
        await asked.has(number)
        reader(workers).drop_connections()
        await eventually(lambda num=number: len(asked.tokens) > num + 1)
    assert await asked.task == expected
    asked = Asked(parts, media=False)
    for number in (2, 4, 6):
        await asked.has(number)
        reader(workers).drop_connections()
        await eventually(lambda num=number: len(asked.tokens) > num + 1 or asked.task.done())
    with pytest.raises(WorkerLost):
        await asked.task
    assert asked.tokens == expected[: len(asked.tokens)], "what was delivered is right"


@pytest.mark.parametrize("settings", [{"migration_limit": 0}, {}], ids=["off", "obstacle"])
async def test_answer_that_cannot_go_on_ends_with_a_retryable_error(open_parts, settings):
    parts, workers = await open_parts(2, **settings)
    asked = Asked(parts, obstacle="" if settings else "structured output")
    await asked.has(3)
    reader(workers).drop_connections()
    with pytest.raises(WorkerLost) as caught:
        await asked.task
    assert ("structured output cannot go on" in caught.value.message) == (not settings)
    assert caught.value.retry_after_s


async def test_answer_waits_for_a_worker_to_be_ready(open_parts):
    parts, (worker,) = await open_parts(1)
    expected = await Asked(parts).task
    asked = Asked(parts)
    await asked.has(3)
    await worker.close()
    await eventually(lambda: not parts.links.num_ready)
    await worker.start()
    assert await asked.task == expected


async def test_all_answers_of_the_only_worker_go_on_when_it_is_back(open_parts):
    """Requests that wait for their turn when it is back, as much as the one that has it."""
    parts, (worker,) = await open_parts(1, migration_timeout_s=5)
    expected = await Asked(parts, media=False).task
    asked = [Asked(parts, media=False) for _ in range(4)]
    for each in asked:
        await each.has(2)
    await worker.close()
    await asyncio.sleep(0.2)  # time: all of them wait
    await worker.start()
    assert await asyncio.gather(*[each.task for each in asked]) == [expected] * 4


async def test_wait_for_the_only_worker_ends_in_time_for_all_answers_and_says_so(open_parts):
    parts, (worker,) = await open_parts(1, migration_timeout_s=0.5)
    asked = [Asked(parts, media=False) for _ in range(3)]
    for each in asked:
        await each.has(2)
    started = asyncio.get_running_loop().time()
    await worker.close()
    for error in await asyncio.gather(*[each.task for each in asked], return_exceptions=True):
        assert isinstance(error, WorkerLost)
        assert "no worker was ready within 0.5 s" in error.message
    assert asyncio.get_running_loop().time() - started < 4


async def test_many_answers_of_a_lost_worker_all_go_on(open_parts):
    parts, workers = await open_parts(2)
    expected = await Asked(parts, media=False).task
    asked = [Asked(parts, media=False) for _ in range(60)]
    for one in asked:
        await one.has(2)
    workers[0].drop_connections()
    assert [await one.task for one in asked] == [expected] * len(asked)


async def test_client_that_leaves_while_an_answer_goes_on_leaves_nothing_behind(open_parts):
    parts, workers = await open_parts(2)
    asked = Asked(parts)
    await asked.has(2)
    lost = reader(workers)
    lost.engine.stall()
    await eventually(lambda: parts.count(MIGRATIONS, outcome="continued"))
    asked.task.cancel()
    await asyncio.wait([asked.task])
    lost.engine.resume()
    await eventually(lambda: parts.num_held == 0 and not any(worker.engine.num_reading for worker in workers))


async def test_rolling_restart_of_all_workers_loses_nothing(open_parts):
    parts, workers = await open_parts(3, migration_limit=1)
    expected = await Asked(parts).task
    is_rolling, answers = True, []

    async def client():
        while is_rolling:
            answers.append(await Asked(parts).task)

    clients = [asyncio.create_task(client()) for _ in range(6)]
    for worker in workers * 2:
        await eventually(lambda one=worker: one.engine.num_reading)
        await worker.drain(timeout_s=0.05)
        await worker.start()
        await eventually(lambda: parts.links.num_ready == len(workers))
    is_rolling = False
    await asyncio.gather(*clients)
    assert answers == [expected] * len(answers)
    assert parts.count(MIGRATIONS, reason="worker_draining", outcome="continued")
    assert not any(parts.count("medialane_worker_losses_total", worker=each.address) for each in workers)


async def test_short_answers_end_where_they_began(open_parts):
    parts, workers = await open_parts(2)
    expected = await Asked(parts).task
    asked = Asked(parts)
    await asked.has(2)
    draining = reader(workers)
    ended = asyncio.create_task(draining.drain(timeout_s=5.0))
    await eventually(lambda: parts.links.num_ready == 1)
    assert await Asked(parts).task == expected, "a new request goes to the other worker"
    assert await asked.task == expected
    assert not parts.count(MIGRATIONS, reason="worker_draining", outcome="continued")
    await ended


async def test_answer_moves_from_draining_workers_any_number_of_times(open_parts):
    parts, workers = await open_parts(2, migration_limit=1)
    expected = await Asked(parts).task
    asked = Asked(parts)
    for number in (2, 4, 6):
        await asked.has(number)
        draining = reader(workers)
        await draining.drain(timeout_s=0.0)
        await draining.start()
        await eventually(lambda: parts.links.num_ready == 2)
    assert await asked.task == expected
    assert parts.count(MIGRATIONS, reason="worker_draining", outcome="continued") == 3
