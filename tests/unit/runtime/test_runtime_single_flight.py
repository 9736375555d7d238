"""Callers of the same key share one run of the work."""

import asyncio
import gc

import pytest

from medialane.runtime.tasks import SingleFlight
from waiting import iterations


class Work:
    def __init__(self, result="done"):
        self.result = result
        self.num_runs = 0
        self.num_cancelled = 0
        self.go = asyncio.Event()

    async def __call__(self):
        self.num_runs += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


async def started(flights, work, number, key="key"):
    tasks = [asyncio.create_task(flights.do(key, work)) for _ in range(number)]
    await iterations(2)
    return tasks


async def test_one_run_serves_all_concurrent_callers():
    flights, work = SingleFlight(), Work()
    tasks = await started(flights, work, 5)
    assert len(flights) == 1
    work.go.set()
    assert await asyncio.gather(*tasks) == ["done"] * 5
    assert work.num_runs == 1
    assert len(flights) == 0


async def test_different_keys_run_separately():
    flights, work = SingleFlight(), Work()
    tasks = [*await started(flights, work, 1, "a"), *await started(flights, work, 1, "b")]
    assert work.num_runs == 2
    work.go.set()
    await asyncio.gather(*tasks)


async def test_results_are_not_cached():
    flights, work = SingleFlight(), Work()
    work.go.set()
    await flights.do("key", work)
    await flights.do("key", work)
    assert work.num_runs == 2


async def test_error_reaches_every_caller():
    flights, work = SingleFlight(), Work(ValueError("no"))
    tasks = await started(flights, work, 3)
    work.go.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(error is work.result for error in found)


async def test_cancelled_caller_does_not_stop_the_flight_for_others():
    flights, work = SingleFlight(), Work()
    first, second = await started(flights, work, 2)
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled()
    work.go.set()
    assert await second == "done"
    assert work.num_cancelled == 0


async def test_last_cancelled_caller_ends_the_flight():
    flights, work = SingleFlight(), Work()
    tasks = await started(flights, work, 2)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert len(flights) == 0
    await asyncio.sleep(0)
    assert work.num_cancelled == 1


async def test_caller_after_an_ended_flight_gets_a_new_one():
    flights, work = SingleFlight(), Work()
    (first,) = await started(flights, work, 1)
    first.cancel()
    await asyncio.wait([first])
    again = Work("again")
    again.go.set()
    assert await flights.do("key", again) == "again"


async def test_error_without_waiters_is_not_reported_as_unretrieved(caplog):
    flights = SingleFlight()

    async def failing():
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("no")

    task = asyncio.create_task(flights.do("key", failing))
    await iterations(2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await iterations(3)
    gc.collect()
    assert "never retrieved" not in caplog.text


class CountedResult:
    """A result that counts its holders."""

    def __init__(self):
        self.num_held = 1

    def share(self):
        assert self.num_held, "shared after its end"
        self.num_held += 1
        return self

    def release(self):
        assert self.num_held, "released more often than held"
        self.num_held -= 1


def counting_flights():
    return SingleFlight(share=CountedResult.share, release=CountedResult.release)


async def test_each_caller_owns_a_share_and_the_flight_keeps_none():
    flights, result = counting_flights(), CountedResult()
    work = Work(result)
    tasks = await started(flights, work, 3)
    work.go.set()
    await asyncio.gather(*tasks)
    assert result.num_held == 3


@pytest.mark.parametrize("num_iterations", range(4))
async def test_caller_cancelled_at_completion_leaks_no_share(num_iterations):
    flights, results, go = counting_flights(), [], asyncio.Event()

    async def work():
        await go.wait()
        results.append(CountedResult())
        return results[0]

    (task,) = await started(flights, work, 1)
    go.set()
    await iterations(num_iterations)
    task.cancel()
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert sum(result.num_held for result in results) == (not task.cancelled())
    assert len(flights) == 0


async def test_result_without_callers_is_released():
    flights, result = counting_flights(), CountedResult()

    async def stubborn():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return result

    (task,) = await started(flights, stubborn, 1)
    task.cancel()
    await asyncio.wait([task])
    await iterations(2)
    assert result.num_held == 0


async def test_caller_after_an_abandoned_flight_starts_a_new_one():
    flights, work = counting_flights(), Work(CountedResult())
    (task,) = await started(flights, work, 1)
    work.go.set()
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    again = Work(CountedResult())
    again.go.set()
    assert await flights.do("key", again) is again.result
    assert (work.result.num_held, again.result.num_held) == (0, 1)
