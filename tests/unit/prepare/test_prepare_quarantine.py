"""An item that has ended three preparers is refused for a while; what shared a preparer with it is prepared."""

import asyncio
import os
import signal

import pytest
from preparer_pools import make_pool, png, put, running

from medialane.prepare import job_run
from medialane.prepare.job_run import MAX_ENDED, MAX_ITEMS, QUARANTINE_S, Quarantine
from medialane.types.errors import PreparerCrashed, PreparerTimeout, Unavailable
from waiting import eventually

POISON, INNOCENT = "a" * 64, "b" * 64
REFUSED = "refused"


async def prepare(pool, encoded, key=POISON, options=b"{}"):
    (await pool.prepare_item(encoded, options, key)).release()


@pytest.mark.parametrize("fault", ["kill", "segfault"])
async def test_third_crash_of_an_item_refuses_it_without_a_preparer(arena, encoded, fault):
    options = b'{"fault": "%s"}' % fault.encode()
    async with running(make_pool(arena)) as pool:
        with pytest.raises(PreparerCrashed, match="twice"):
            await prepare(pool, encoded, options=options)
        with pytest.raises(PreparerCrashed, match=REFUSED):  # the third crash; it is not run again
            await prepare(pool, encoded, options=options)
        await eventually(lambda: pool.stats().num_restarts == 3 and pool.stats().num_alive == 1)
        for _ in range(3):
            with pytest.raises(PreparerCrashed, match=REFUSED):
                await prepare(pool, encoded, options=options)
        assert pool.stats().num_restarts == 3
        await prepare(pool, encoded, INNOCENT)
    assert arena.stats().num_leases == 1


async def test_three_hangs_of_an_item_refuse_it(arena, encoded):
    async with running(make_pool(arena, image_timeout_s=0.2)) as pool:
        with pytest.raises(PreparerTimeout):
            await prepare(pool, encoded, options=b'{"fault": "hang"}')
        for _ in range(2):  # the first is the third hang, and not run again
            with pytest.raises(PreparerCrashed, match=REFUSED):
                await prepare(pool, encoded, options=b'{"fault": "hang"}')
        await eventually(lambda: pool.stats().num_restarts == 3)


@pytest.fixture
def num_to_stop(before_sending):
    """How many of the next preparers are stopped when they get a job."""
    left = [0]

    async def stop(preparer, _request):
        if left[0]:
            left[0] -= 1
            os.kill(preparer.pid, signal.SIGSTOP)

    before_sending.append(stop)
    return left


async def test_job_of_a_stopped_preparer_is_run_again(arena, encoded, num_to_stop):
    async with running(make_pool(arena, image_timeout_s=0.5)) as pool:
        for number in range(4):
            num_to_stop[0] = 1
            await prepare(pool, encoded, f"{number:064}")
        assert pool.stats().num_failed == 0


async def test_stopped_preparers_refuse_no_item(arena, num_to_stop):
    """However often it is not prepared: its client is to try again."""
    async with running(make_pool(arena, image_timeout_s=0.3)) as pool:
        with put(arena, png(seed=1)) as innocent:
            for _ in range(4):
                num_to_stop[0] = 2
                with pytest.raises(Unavailable, match="was stopped") as raised:
                    await pool.probe_item(innocent)
                assert (raised.value.status, raised.value.retry_after_s) == (503, 1)
            await pool.probe_item(innocent)


async def test_item_that_computes_too_long_is_at_fault(arena, encoded, monkeypatch):
    """It has had the CPU."""
    monkeypatch.setattr(job_run, "MIN_CPU_SHARE", 0.02)  # machines of tests are busy
    async with running(make_pool(arena, image_timeout_s=0.3)) as pool:
        with pytest.raises(PreparerTimeout, match=r"longer than 0\.3 s"):
            await prepare(pool, encoded, options=b'{"fault": "spin"}')


async def test_neighbours_of_a_poisonous_item_are_prepared(arena, encoded):
    """Jobs that wait behind it, and jobs that are copied while it is decoded; more often than it is tolerated."""
    async with running(make_pool(arena)) as pool:
        for number in range(4):
            poison = [pool.prepare_item(encoded, b'{"fault": "kill"}', POISON) for _ in range(2)]
            innocent = [prepare(pool, encoded, f"{number}{n}".rjust(64, "0")) for n in range(4)]
            results = await asyncio.gather(
                innocent[0], poison[0], innocent[1], innocent[2], poison[1], innocent[3], return_exceptions=True
            )
            assert [type(result) for result in results if result is not None] == [PreparerCrashed] * 2, results
            assert isinstance(results[1], PreparerCrashed)
        assert pool.stats().num_restarts == 3
    assert arena.stats().num_leases == 1


async def test_item_that_is_prepared_after_crashes_starts_over(arena, encoded):
    """Lack of memory ends preparers of innocent items, too."""
    async with running(make_pool(arena)) as pool:
        for _ in range(2):
            with pytest.raises(PreparerCrashed, match="twice"):
                await prepare(pool, encoded, options=b'{"fault": "kill"}')
            await prepare(pool, encoded)


async def test_cancelled_jobs_are_not_counted(arena, encoded):
    """Their preparers are killed for another reason."""
    async with running(make_pool(arena)) as pool:
        for number in range(1, 5):
            job = asyncio.create_task(prepare(pool, encoded, options=b'{"fault": "hang"}'))
            await eventually(lambda: pool.stats().num_busy == 1)
            job.cancel()
            await asyncio.wait([job])
            await eventually(lambda n=number: pool.stats().num_restarts == n and pool.stats().num_alive == 1)
        await prepare(pool, encoded)


def test_item_is_tried_again_after_a_while(clock):
    quarantine = Quarantine(clock)
    for _ in range(MAX_ENDED):
        quarantine.check(POISON)
        quarantine.add(POISON)
    with pytest.raises(PreparerCrashed, match=REFUSED):
        quarantine.check(POISON)
    clock.now += QUARANTINE_S + 1
    quarantine.check(POISON)


def test_number_of_remembered_items_is_bounded(clock):
    quarantine = Quarantine(clock)
    for _ in range(MAX_ENDED):
        quarantine.add(POISON)
    for number in range(MAX_ITEMS):
        quarantine.add(str(number))
    quarantine.check(POISON)
