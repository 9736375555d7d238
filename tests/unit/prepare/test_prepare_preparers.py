"""A preparer runs the next job while the gateway copies the tensors of the current one."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from preparer_pools import is_running, make_pool, refuse_reading, running

from medialane.prepare import forkserver_process, job_run, pool
from medialane.prepare.job_run import JobRunner
from medialane.prepare.messages import FreeTensors
from medialane.prepare.preparer_process import PreparerProcess
from medialane.types.errors import (
    ArenaFull,
    InvalidImage,
    PreparationFailed,
    PreparerCrashed,
    PreparerTimeout,
    Unavailable,
)
from waiting import eventually

FIRST, SECOND, THIRD = ("a" * 64, "b" * 64, "c" * 64)


def start(used, encoded, mm_hash, **options) -> asyncio.Task:
    return asyncio.create_task(used.prepare_item(encoded, json.dumps(options).encode(), mm_hash))


@pytest.fixture
def sent(monkeypatch) -> list[str]:
    """Names of the messages that were sent to preparers."""
    names = []
    send = PreparerProcess.send

    async def recording(self, request):
        names.append(type(request).__name__)
        await send(self, request)

    monkeypatch.setattr(PreparerProcess, "send", recording)
    return names


class FirstCopy:
    """Interrupts the end of the first copy until `resume` is set; `pid` is then the preparer's."""

    def __init__(self, monkeypatch) -> None:
        self.begun, self.resume = asyncio.Event(), asyncio.Event()
        self.pid = 0
        send = PreparerProcess.send

        async def interrupted(preparer, request):
            if isinstance(request, FreeTensors) and not self.begun.is_set():
                self.pid = preparer.pid
                self.begun.set()
                await self.resume.wait()
            await send(preparer, request)

        monkeypatch.setattr(PreparerProcess, "send", interrupted)


@asynccontextmanager
async def two_jobs(arena, encoded, monkeypatch, settings=None, **second) -> AsyncIterator[tuple]:
    """A pool whose only preparer runs the second job while the copy of the first is interrupted."""
    copy = FirstCopy(monkeypatch)
    async with running(make_pool(arena, **settings or {})) as used:
        jobs = [start(used, encoded, FIRST), start(used, encoded, SECOND, **second)]
        await copy.begun.wait()
        yield used, copy, *jobs


async def test_next_job_is_sent_before_tensors_are_copied(arena, encoded, sent):
    async with running(make_pool(arena)) as used:
        for lease in await asyncio.gather(*(start(used, encoded, key) for key in (FIRST, SECOND, THIRD))):
            lease.release()
    assert sent == ["ProcessItem", "ProcessItem", "FreeTensors", "ProcessItem", "FreeTensors", "FreeTensors"]


@pytest.mark.parametrize("reason", ["large tensors", "last job", "preparers write"])
async def test_next_job_waits(arena, encoded, monkeypatch, sent, reason):
    if reason == "large tensors":
        monkeypatch.setattr(job_run, "OVERLAPPED_BYTES", 1000)
    if reason == "preparers write":
        monkeypatch.setattr(forkserver_process, "read_into", refuse_reading)
    async with running(make_pool(arena, max_jobs_per_preparer=reason == "last job")) as used:
        for lease in await asyncio.gather(start(used, encoded, FIRST), start(used, encoded, SECOND)):
            lease.release()
    assert sent == ["ProcessItem", "Range" if reason == "preparers write" else "FreeTensors"] * 2


async def test_preparer_killed_with_two_jobs_fails_neither(arena, encoded, monkeypatch):
    async with two_jobs(arena, encoded, monkeypatch, sleep_s=0.3) as (used, copy, *jobs):
        os.kill(copy.pid, signal.SIGKILL)
        await eventually(lambda: not is_running(copy.pid))
        copy.resume.set()
        for lease in await asyncio.gather(*jobs):
            lease.release()
        stats = used.stats()
        assert (stats.num_done, stats.num_failed, stats.num_restarts) == (2, 0, 1)


async def test_item_that_crashes_its_preparer_fails_only_its_own_job(arena, encoded, monkeypatch):
    async with two_jobs(arena, encoded, monkeypatch, fault="kill") as (used, copy, first, second):
        await eventually(lambda: not is_running(copy.pid))
        copy.resume.set()
        (await first).release()
        with pytest.raises(PreparerCrashed):
            await second
        await eventually(lambda: used.stats().num_restarts == 2)  # one with both jobs, one with the second alone


async def test_invalid_tensors_fail_only_their_own_job(arena, encoded, monkeypatch):
    """The first job is retried, and fails once it is alone."""
    read = PreparerProcess.read

    def failing(preparer, addresses, into):
        read(preparer, (8, 8) if forged == into[0].nbytes else addresses, into)

    forged = 30 * 40 * 3 * 4
    monkeypatch.setattr(PreparerProcess, "read", failing)
    async with running(make_pool(arena)) as used:
        first, second = start(used, encoded, FIRST), start(used, encoded, SECOND, fault="reject")
        with pytest.raises(PreparerCrashed):
            await first
        with pytest.raises(InvalidImage, match="rejects"):
            await second


async def test_hanging_next_job_times_out_alone(arena, encoded, monkeypatch):
    settings = {"image_timeout_s": 0.5}
    async with two_jobs(arena, encoded, monkeypatch, settings, fault="hang") as (_, copy, first, second):
        copy.resume.set()
        (await first).release()
        with pytest.raises(PreparerTimeout):
            await second


async def test_copy_past_the_deadline_fails_no_job(arena, encoded, monkeypatch):
    async with two_jobs(arena, encoded, monkeypatch, {"image_timeout_s": 0.5}) as (used, _copy, first, second):
        for job in (first, second):
            (await job).release()
        assert used.stats().num_restarts == 1


async def test_cancelled_next_job_is_stopped(arena, encoded, monkeypatch):
    monkeypatch.setattr(pool, "ABANDONED_S", 0.05)
    settings = {"image_timeout_s": 60.0}
    async with two_jobs(arena, encoded, monkeypatch, settings, sleep_s=30) as (used, copy, first, second):
        second.cancel()
        await asyncio.wait([second])
        copy.resume.set()
        (await first).release()
        (await start(used, encoded, THIRD)).release()
        assert not is_running(copy.pid)
        assert not arena.contains(SECOND)


async def test_cancelled_job_is_not_retried(arena, encoded, monkeypatch):
    async with two_jobs(arena, encoded, monkeypatch, sleep_s=0.3) as (used, copy, first, second):
        second.cancel()
        await asyncio.wait([second])
        os.kill(copy.pid, signal.SIGKILL)
        await eventually(lambda: not is_running(copy.pid))
        copy.resume.set()
        (await first).release()
        (await start(used, encoded, THIRD)).release()
        assert not arena.contains(SECOND)


async def test_full_arena_fails_only_its_own_job(arena, encoded, monkeypatch):
    reserve, failures = arena.reserve, [ArenaFull("no space")]

    def failing_once(num_bytes, kind, **options):
        if failures:
            raise failures.pop()
        return reserve(num_bytes, kind, **options)

    monkeypatch.setattr(arena, "reserve", failing_once)
    async with running(make_pool(arena)) as used:
        first, second = start(used, encoded, FIRST), start(used, encoded, SECOND)
        with pytest.raises(ArenaFull):
            await first
        (await second).release()
        assert used.stats().num_restarts == 0


async def test_next_job_that_cannot_be_sent_fails_alone(arena, encoded, monkeypatch):
    send = JobRunner.send

    async def refusing(runner, job, preparer):
        if job.mm_hash == SECOND:
            raise PreparationFailed("too large")
        await send(runner, job, preparer)

    monkeypatch.setattr(JobRunner, "send", refusing)
    async with running(make_pool(arena)) as used:
        first, second = start(used, encoded, FIRST), start(used, encoded, SECOND)
        (await first).release()
        with pytest.raises(PreparationFailed, match="too large"):
            await second
        assert used.stats().num_restarts == 0


async def test_close_fails_both_jobs_of_a_preparer(arena, encoded, monkeypatch):
    async with two_jobs(arena, encoded, monkeypatch, sleep_s=4) as (used, _copy, *jobs):
        await used.close()
        for job in jobs:
            with pytest.raises(Unavailable):
                await job
