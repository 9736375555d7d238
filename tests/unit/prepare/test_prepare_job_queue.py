import asyncio

import pytest
from preparer_pools import png, put

from medialane.prepare.job_queue import INITIAL_S, Job, JobQueue, JobResult
from medialane.prepare.messages import ProcessItem
from medialane.types.errors import MediaOverloaded, Unavailable


@pytest.fixture
def make_job(arena):
    source = put(arena, png())
    jobs = []

    def asked(job_id: int) -> ProcessItem:
        return ProcessItem(job_id, source.value, b"{}", b"{}")

    def make(modality="image") -> Job:
        jobs.append(Job(asked, source.duplicate(), key="a" * 64, modality=modality, timeout_s=1))
        return jobs[-1]

    yield make
    source.release()
    for job in jobs:
        job.close()


def never() -> bool:
    return False


async def test_jobs_are_taken_fifo(make_job):
    queue = JobQueue(limit=4, timeout_s=1)
    jobs = [make_job() for _ in range(3)]
    for job in jobs:
        queue.put(job)
    assert [await queue.take(never) for _ in jobs] == jobs


async def test_idle_taker_admits_a_job_beyond_the_limit(make_job):
    queue = JobQueue(limit=1, timeout_s=1)
    taker = asyncio.create_task(queue.take(never))
    await asyncio.sleep(0)
    queue.put(make_job())
    queue.put(make_job())
    with pytest.raises(MediaOverloaded):
        queue.put(make_job())
    await taker
    queue.fail_all(Unavailable("end"))


async def test_refusals_say_when_the_queue_is_expected_to_be_done(make_job):
    queue = JobQueue(limit=1, timeout_s=0.05, drain_s=lambda: 47.2)
    waiting = make_job()
    queue.put(waiting)
    with pytest.raises(MediaOverloaded) as full:
        queue.put(make_job())
    with pytest.raises(MediaOverloaded) as late:
        await waiting.result
    assert (full.value.retry_after_s, late.value.retry_after_s) == (48, 48)


async def test_woken_taker_returns_without_a_job(make_job):
    queue = JobQueue(limit=4, timeout_s=1)
    gone = asyncio.Event()
    taker = asyncio.create_task(queue.take(gone.is_set))
    await asyncio.sleep(0)
    gone.set()
    queue.wake()
    assert await taker is None
    queue.put(make_job())
    assert await queue.take(gone.is_set) is None
    assert len(queue) == 1
    queue.fail_all(Unavailable("end"))


async def test_job_goes_to_exactly_one_of_two_takers(make_job):
    queue = JobQueue(limit=4, timeout_s=1)
    takers = [asyncio.create_task(queue.take(never)) for _ in range(2)]
    await asyncio.sleep(0)
    queue.put(make_job())
    done, waiting = await asyncio.wait(takers, timeout=0.05)
    assert (len(done), len(waiting)) == (1, 1)
    queue.put(make_job())
    await asyncio.wait_for(waiting.pop(), 1)


async def test_cancelled_taker_loses_no_job(make_job):
    queue = JobQueue(limit=4, timeout_s=1)
    taker = asyncio.create_task(queue.take(never))
    await asyncio.sleep(0)
    queue.put(make_job())
    taker.cancel()
    await asyncio.wait([taker])
    assert len(queue) == 1
    queue.fail_all(Unavailable("end"))


async def test_job_waiting_too_long_fails_and_releases_its_pin(arena, make_job):
    queue = JobQueue(limit=4, timeout_s=0.05)
    job = make_job()
    before = arena.stats().num_leases
    queue.put(job)
    with pytest.raises(MediaOverloaded):
        await job.result
    assert arena.stats().num_leases == before - 1
    assert len(queue) == 0


async def test_only_a_queued_job_can_be_withdrawn(make_job):
    queue = JobQueue(limit=4, timeout_s=1)
    first, second = make_job(), make_job()
    queue.put(first)
    queue.put(second)
    assert queue.withdraw(first)
    assert not queue.withdraw(first)
    assert await queue.take(never) is second
    assert not queue.withdraw(second)


async def test_job_put_back_is_taken_first_and_shares_no_preparer(arena, make_job):
    queue = JobQueue(limit=4, timeout_s=1)
    retried, waiting = make_job(), make_job()
    queue.put(retried)
    queue.put(waiting)
    assert queue.take_second() is retried
    retried.begin()
    retried.reservation = arena.reserve(100)
    queue.put_back(retried)
    assert arena.stats().num_reservations == 0
    assert queue.take_second() is None
    assert [await queue.take(never), queue.take_second()] == [retried, waiting]


async def test_job_without_a_caller_is_not_put_back(arena, make_job):
    queue = JobQueue(limit=4, timeout_s=1)
    job = make_job()
    before = arena.stats().num_leases
    job.abandon_result(0.25)
    queue.put_back(job)
    assert len(queue) == 0
    assert arena.stats().num_leases == before - 1


async def test_closed_job_releases_its_range_once(arena, make_job):
    job = make_job()
    job.reservation = arena.reserve(100)
    job.close()
    job.close()
    assert arena.stats().num_reservations == 0


async def test_result_without_a_waiter_is_released(arena, encoded, make_job):
    job = make_job()
    job.abandon_result(0.25)
    before = arena.stats().num_leases
    job.settle(JobResult(encoded.duplicate()))
    await asyncio.sleep(0)
    assert arena.stats().num_leases == before


async def test_result_after_a_failure_is_released(arena, encoded, make_job):
    job = make_job()
    job.settle(JobResult(error=Unavailable("late")))
    before = arena.stats().num_leases
    job.settle(JobResult(encoded.duplicate()))
    assert arena.stats().num_leases == before
    with pytest.raises(Unavailable):
        await job.result


async def test_waiting_work_is_estimated_from_the_jobs_that_have_ended(make_job):
    queue = JobQueue(limit=4, timeout_s=1)
    done = make_job()
    done.busy_s = 2.0
    queue.learn(done)
    queue.learn(make_job())  # it has failed: its time is unknown
    assert queue.work_s == 0.0
    for _ in range(3):
        queue.put(make_job())
    assert queue.work_s == pytest.approx(6.0)
    await queue.take(never)
    assert queue.work_s == pytest.approx(4.0)
    queue.fail_all(Unavailable("end"))
    assert queue.work_s == 0.0


async def test_work_of_each_modality_follows_its_last_items_and_an_unknown_one_all_together(make_job):
    queue = JobQueue(limit=4, timeout_s=1)

    def learn(**seconds):
        for modality, busy_s in seconds.items():
            done = make_job(modality)
            done.busy_s = busy_s
            for _ in range(100):
                queue.learn(done)

    def work_s(modality):
        job = make_job(modality)
        queue.put(job)
        seconds = queue.work_s
        queue.withdraw(job)
        return seconds

    assert work_s("audio") == INITIAL_S
    learn(video=4.0, image=0.05)
    assert [work_s(modality) for modality in ("image", "video")] == pytest.approx([0.05, 4.0])
    assert work_s("audio") == pytest.approx(0.05, rel=0.01), "the last ones of all"
    learn(image=0.2)
    assert [work_s(modality) for modality in ("image", "video")] == pytest.approx([0.2, 4.0], rel=0.01)
