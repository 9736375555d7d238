"""A preparer runs the next job while the gateway copies the tensors of the current one."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from preparer_pools import is_running, make_pool, png, put, running

from builders import checked_arena
from medialane.prepare import job_run
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
def sent(before_sending) -> list[str]:
    """Names of the messages that were sent to preparers."""
    names = []

    async def note(_preparer, request):
        names.append(type(request).__name__)

    before_sending.append(note)
    return names


class FirstCopy:
    """Interrupts the end of the first copy until `resume` is set; `pid` is then the preparer's."""

    def __init__(self, before_sending) -> None:
        self.begun, self.resume = asyncio.Event(), asyncio.Event()
        self.pid = 0
        before_sending.append(self._interrupt)

    async def _interrupt(self, preparer, request):
        if type(request).__name__ == "FreeTensors" and not self.begun.is_set():
            self.pid = preparer.pid
            self.begun.set()
            await self.resume.wait()


@asynccontextmanager
async def two_jobs(arena, encoded, before_sending, settings=None, **second) -> AsyncIterator[tuple]:
    """A pool whose only preparer runs the second job while the copy of the first is interrupted."""
    copy = FirstCopy(before_sending)
    async with running(make_pool(arena, **settings or {})) as used:
        jobs = [start(used, encoded, FIRST), start(used, encoded, SECOND, **second)]
        await copy.begun.wait()
        yield used, copy, *jobs


async def test_next_job_is_sent_before_tensors_are_copied(arena, encoded, sent):
    async with running(make_pool(arena)) as used:
        for pin in await asyncio.gather(*(start(used, encoded, key) for key in (FIRST, SECOND, THIRD))):
            pin.release()
    assert sent == ["ProcessItem", "ProcessItem", "FreeTensors", "ProcessItem", "FreeTensors", "FreeTensors"]


@pytest.fixture
def large_png():
    """Made outside of the event loop."""
    return png(1700, 1700)


async def test_next_job_waits_for_the_copy_of_large_tensors(sent, large_png):
    with checked_arena(128 << 20) as large_arena, put(large_arena, large_png) as large:
        async with running(make_pool(large_arena)) as used:
            for pin in await asyncio.gather(start(used, large, FIRST), start(used, large, SECOND)):
                assert pin.value.nbytes > job_run.OVERLAPPED_BYTES
                pin.release()
    assert sent == ["ProcessItem", "FreeTensors"] * 2


@pytest.mark.parametrize("reason", ["last job", "preparers write"])
async def test_next_job_waits(request, arena, encoded, sent, reason):
    if reason == "preparers write":
        request.getfixturevalue("_preparers_write")
    async with running(make_pool(arena, max_jobs_per_preparer=reason == "last job")) as used:
        for pin in await asyncio.gather(start(used, encoded, FIRST), start(used, encoded, SECOND)):
            pin.release()
    assert sent == ["ProcessItem", "Range" if reason == "preparers write" else "FreeTensors"] * 2


async def test_preparer_killed_with_two_jobs_fails_neither(arena, encoded, before_sending):
    async with two_jobs(arena, encoded, before_sending, sleep_s=0.3) as (used, copy, *jobs):
        os.kill(copy.pid, signal.SIGKILL)
        await eventually(lambda: not is_running(copy.pid))
        copy.resume.set()
        for pin in await asyncio.gather(*jobs):
            pin.release()
        stats = used.stats()
        assert (stats.num_done, stats.num_failed, stats.num_restarts) == (2, 0, 1)


async def test_item_that_crashes_its_preparer_fails_only_its_own_job(arena, encoded, before_sending):
    async with two_jobs(arena, encoded, before_sending, fault="kill") as (used, copy, first, second):
        await eventually(lambda: not is_running(copy.pid))
        copy.resume.set()
        (await first).release()
        with pytest.raises(PreparerCrashed):
            await second
        await eventually(lambda: used.stats().num_restarts == 2)  # one with both jobs, one with the second alone


async def test_invalid_tensors_fail_only_their_own_job(arena, encoded, reported_addresses):
    """The first job is retried, and fails once it is alone."""
    forged = 30 * 40 * 3 * 4
    reported_addresses(lambda addresses, into: (8, 8) if forged == into[0].nbytes else addresses)
    async with running(make_pool(arena)) as used:
        first, second = start(used, encoded, FIRST), start(used, encoded, SECOND, fault="reject")
        with pytest.raises(PreparerCrashed):
            await first
        with pytest.raises(InvalidImage, match="rejects"):
            await second


async def test_hanging_next_job_times_out_alone(arena, encoded, before_sending):
    settings = {"image_timeout_s": 0.5}
    async with two_jobs(arena, encoded, before_sending, settings, fault="hang") as (_, copy, first, second):
        copy.resume.set()
        (await first).release()
        with pytest.raises(PreparerTimeout):
            await second


async def test_copy_past_the_deadline_fails_no_job(arena, encoded, before_sending):
    async with two_jobs(arena, encoded, before_sending, {"image_timeout_s": 0.5}) as (used, _copy, first, second):
        for job in (first, second):
            (await job).release()
        assert used.stats().num_restarts == 1


async def test_cancelled_next_job_is_stopped(arena, encoded, before_sending):
    settings = {"image_timeout_s": 60.0}
    async with two_jobs(arena, encoded, before_sending, settings, sleep_s=30) as (used, copy, first, second):
        second.cancel()
        await asyncio.wait([second])
        copy.resume.set()
        (await first).release()
        (await start(used, encoded, THIRD)).release()
        assert not is_running(copy.pid)
        assert not arena.contains(SECOND)


async def test_cancelled_job_is_not_retried(arena, encoded, before_sending):
    async with two_jobs(arena, encoded, before_sending, sleep_s=0.3) as (used, copy, first, second):
        second.cancel()
        await asyncio.wait([second])
        os.kill(copy.pid, signal.SIGKILL)
        await eventually(lambda: not is_running(copy.pid))
        copy.resume.set()
        (await first).release()
        (await start(used, encoded, THIRD)).release()
        assert not arena.contains(SECOND)


async def test_full_arena_fails_only_its_own_job(arena, encoded):
    def fail(_reserve):
        raise ArenaFull("no space")

    arena.reserving.append(fail)
    async with running(make_pool(arena)) as used:
        first, second = start(used, encoded, FIRST), start(used, encoded, SECOND)
        with pytest.raises(ArenaFull):
            await first
        (await second).release()
        assert used.stats().num_restarts == 0


async def test_next_job_that_cannot_be_sent_fails_alone(arena, encoded, before_sending):
    async def refuse(_preparer, request):
        if type(request).__name__ == "ProcessItem" and b"second" in request.options:
            raise PreparationFailed("too large")

    before_sending.append(refuse)
    async with running(make_pool(arena)) as used:
        first, second = start(used, encoded, FIRST), start(used, encoded, SECOND, name="second")
        (await first).release()
        with pytest.raises(PreparationFailed, match="too large"):
            await second
        assert used.stats().num_restarts == 0


async def test_close_fails_both_jobs_of_a_preparer(arena, encoded, before_sending):
    async with two_jobs(arena, encoded, before_sending, sleep_s=4) as (used, _copy, *jobs):
        await used.close()
        for job in jobs:
            with pytest.raises(Unavailable):
                await job
