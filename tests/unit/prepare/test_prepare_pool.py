import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import uvloop
from preparer_pools import FACTORY, children, forkserver_of, is_running, make_pool, png, put, running

from medialane.media import MediaConfig
from medialane.observability import RequestTimeline
from medialane.prepare import (
    NO_PROCESSOR_FACTORY,
    PrepareConfig,
    PreparerPool,
    forkserver_process,
    job_run,
    preparers,
)
from medialane.runtime import heartbeat
from medialane.types.errors import (
    ArenaFull,
    InvalidImage,
    InvalidRequest,
    MediaOverloaded,
    MediaTooLarge,
    PreparationFailed,
    PreparerCrashed,
    PreparerTimeout,
    StartupFailed,
    Unavailable,
    UnsupportedMediaType,
)
from medialane.types.feature import MAX_HEADER_BYTES
from medialane.types.media import MediaSize
from planted_secrets import texts_of
from waiting import eventually, wait_until

#: A processor that takes longer to build than any of these tests may take to go on.
SLOW_START_S = 4.0
SLOW_START = json.dumps({"warm_s": SLOW_START_S}).encode()


def descendants(pid: int) -> set[int]:
    found = {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    return found.union(*map(descendants, found))


def options(**wanted) -> bytes:
    return json.dumps(wanted).encode()


async def test_item_becomes_a_published_feature_with_the_processors_tensors(arena, encoded):
    timeline = RequestTimeline()
    async with running(make_pool(arena)) as pool:
        with await pool.prepare_item(encoded, b"{}", "a" * 64, timeline) as pin:
            feature = pin.value
            pixels, shape = (arena.view.tensor(t) for t in feature.tensors)
            assert shape.cast("q").tolist() == [30, 40]
            assert np.frombuffer(pixels, np.float32).size == 30 * 40 * 3
            assert json.loads(feature.header) == {"height": 30, "width": 40}
        assert (feature.modality, feature.mm_hash, feature.size) == ("image", "a" * 64, MediaSize(40, 30))
        assert arena.contains("a" * 64)
    assert timeline.seconds["decode"] > 0
    assert timeline.seconds["process"] > 0


@pytest.mark.usefixtures("_preparers_write")
async def test_without_process_vm_readv_preparers_write_the_arena_and_it_is_logged(arena, encoded, caplog):
    async with running(make_pool(arena)) as pool:
        with await pool.prepare_item(encoded, options(scale=2.0, by_content=True), "a" * 64) as pin:
            pixels, _ = (arena.view.tensor(t) for t in pin.value.tensors)
            total = np.frombuffer(pixels, np.float32).sum(dtype=np.float64)
            assert json.loads(pin.value.header) == {"sum": total / 2}
    assert "change other requests' media in shared memory" in caplog.text


@pytest.mark.parametrize(("width", "height"), [(900, 700), (1300, 1000)])
async def test_large_tensors_are_copied_completely(arena, width, height):
    """By the event loop, or by a thread."""
    with put(arena, png(width, height, seed=9)) as encoded:
        async with running(make_pool(arena)) as pool:
            with await pool.prepare_item(encoded, b"{}", "a" * 64) as pin:
                assert (pin.value.nbytes > job_run.COPIED_AT_ONCE_BYTES) == (width > 1000)
                pixels, _ = (arena.view.tensor(t) for t in pin.value.tensors)
                expected = np.random.default_rng(9).integers(0, 256, (height, width, 3), dtype=np.uint8)
                assert np.array_equal(np.frombuffer(pixels, np.float32), expected.astype(np.float32).ravel())


@pytest.mark.parametrize("own", [None, "glibc.malloc.check=0"])
async def test_preparers_request_huge_pages_besides_given_tunables(arena, encoded, monkeypatch, own):
    if own is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", own)
    async with running(make_pool(arena)) as pool:
        (await pool.prepare_item(encoded, b"{}", "a" * 64)).release()
        (pid,) = pool.preparer_pids
        assert "hg" in mapping_flags(pid)
        assert own is None or any(own.encode() in text for text in texts_of(pid, len(own)))


def mapping_flags(pid: int) -> set[str]:
    lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
    return {flag for line in lines if line.startswith("VmFlags") for flag in line.split()[1:]}


async def test_without_options_an_item_is_only_decoded(arena):
    array = np.random.default_rng(3).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    async with running(make_pool(arena)) as pool:
        with put(arena, png(40, 30, seed=3)) as encoded, await pool.prepare_item(encoded, None, "d" * 64) as pin:
            (tensor,) = pin.value.tensors
            assert (tensor.spec.dtype, tensor.spec.shape) == ("uint8", (30, 40, 3))
            assert bytes(arena.view.tensor(tensor)) == array.tobytes()
            assert (pin.value.header, pin.value.size) == (b"", MediaSize(40, 30))


async def test_two_preparers_work_concurrently(arena, encoded):
    async with running(make_pool(arena, num_preparers=2)) as pool:
        jobs = [asyncio.create_task(pool.prepare_item(encoded, options(sleep_s=1), f"{n:064}")) for n in range(2)]
        await eventually(lambda: pool.stats().num_busy == 2)
        for pin in await asyncio.gather(*jobs):
            pin.release()
        assert pool.stats().num_done == 2


@pytest.mark.parametrize("fault", ["kill", "abort", "segfault", "exit"])
async def test_crash_fails_only_its_job(arena, encoded, fault):
    async with running(make_pool(arena, num_preparers=2)) as pool:
        other = asyncio.create_task(pool.prepare_item(encoded, options(sleep_s=1), "b" * 64))
        await eventually(lambda: pool.stats().num_busy == 1)
        with pytest.raises(PreparerCrashed):
            await pool.prepare_item(encoded, options(fault=fault), "a" * 64)
        (await pool.prepare_item(encoded, b"{}", "c" * 64)).release()
        (await other).release()
        await eventually(lambda: pool.stats().num_alive == 2)
        assert pool.stats().num_restarts == 2, "it was run again, in case something else has killed the first preparer"
        assert not arena.contains("a" * 64)


@pytest.mark.parametrize("kind", ["item", "probe"])
async def test_innocent_item_survives_the_death_of_its_preparer(arena, encoded, kind):
    """The kernel kills preparers first when memory is short."""
    async with running(make_pool(arena)) as pool:
        if kind == "item":
            job = asyncio.create_task(pool.prepare_item(encoded, options(sleep_s=1), "a" * 64))
        else:
            os.kill(pool.preparer_pids[0], signal.SIGSTOP)
            job = asyncio.create_task(pool.probe_item(encoded))
        await eventually(lambda: pool.stats().num_busy == 1)
        os.kill(pool.preparer_pids[0], signal.SIGKILL)
        pin = await job
        if pin is not None:
            pin.release()
        stats = pool.stats()
        assert (stats.num_done, stats.num_failed, stats.num_restarts) == (1, 0, 1)


async def test_item_whose_preparer_dies_again_fails_at_once(arena, encoded):
    async with running(make_pool(arena)) as pool:
        job = asyncio.create_task(pool.prepare_item(encoded, options(sleep_s=30), "a" * 64))
        for _ in range(2):
            await eventually(lambda: pool.stats().num_busy == 1)
            killed_at, pid = time.monotonic(), pool.preparer_pids[0]
            os.kill(pid, signal.SIGKILL)
            await eventually(lambda pid=pid: pid not in pool.preparer_pids)
        with pytest.raises(PreparerCrashed, match="twice"):
            await job
        assert time.monotonic() - killed_at < 5
        (await pool.prepare_item(encoded, b"{}", "b" * 64)).release()


@pytest.fixture
def stopped(before_sending):
    """The pid of the first preparer that gets a range to write, which is stopped before it does."""
    pids = []

    async def stop(preparer, request):
        if type(request).__name__ == "Range" and not pids:
            pids.append(preparer.pid)
            os.kill(preparer.pid, signal.SIGSTOP)

    before_sending.append(stop)
    return pids


@pytest.mark.usefixtures("_preparers_write")
async def test_range_of_a_preparer_dying_while_writing_is_freed_after_its_exit(arena, encoded, stopped):
    async with running(make_pool(arena)) as pool:
        job = asyncio.create_task(pool.prepare_item(encoded, b"{}", "a" * 64))
        await eventually(lambda: stopped)
        (victim,) = stopped
        await asyncio.sleep(0.1)  # time: in which the range is not freed
        assert arena.stats().num_reservations == 1
        os.kill(victim, signal.SIGKILL)
        await eventually(lambda: arena.stats().num_reservations == 0)
        assert not is_running(victim)
        (await job).release()  # it was run again


@pytest.mark.usefixtures("_preparers_write")
async def test_range_stays_reserved_while_a_timed_out_preparer_lives(arena, encoded, stopped):
    abandoned_while_running = []

    def watch(reserve):
        reservation = reserve()
        abandon = reservation.abandon

        def watched_abandon():
            abandoned_while_running.append(is_running(stopped[0]))
            abandon()

        reservation.abandon = watched_abandon
        return reservation

    async with running(make_pool(arena, image_timeout_s=0.3)) as pool:
        arena.reserving.append(watch)
        (await pool.prepare_item(encoded, b"{}", "a" * 64)).release()
        await eventually(lambda: arena.stats().num_reservations == 0)
    assert abandoned_while_running == [False]


async def test_hanging_job_times_out_after_two_tries(arena, encoded):
    async with running(make_pool(arena, image_timeout_s=0.3)) as pool:
        (victim,) = pool.preparer_pids
        started = time.monotonic()
        with pytest.raises(PreparerTimeout):
            await pool.prepare_item(encoded, options(fault="hang"), "a" * 64)
        assert time.monotonic() - started > 0.55
        await eventually(lambda: pool.stats().num_restarts == 2)
        (await pool.prepare_item(encoded, b"{}", "b" * 64)).release()
        assert not is_running(victim)


async def test_job_exceeding_memory_fails_and_its_preparer_continues(arena, encoded):
    async with running(make_pool(arena, memory_limit_bytes=256 << 20)) as pool:
        before = pool.preparer_pids
        with pytest.raises(PreparationFailed, match="memory"):
            await pool.prepare_item(encoded, options(fault="hog"), "a" * 64)
        (await pool.prepare_item(encoded, b"{}", "b" * 64)).release()
        assert pool.preparer_pids == before


async def test_error_of_a_job_keeps_its_class_and_its_preparer(arena, encoded):
    async with running(make_pool(arena)) as pool:
        before = pool.preparer_pids
        with pytest.raises(InvalidImage, match="fake processor"):
            await pool.prepare_item(encoded, options(fault="reject"), "a" * 64)
        with pytest.raises(PreparationFailed, match="preparing this item failed") as caught:
            await pool.prepare_item(encoded, options(fault="raise"), "a" * 64)
        assert type(caught.value) is PreparationFailed
        with put(arena, b"no image at all") as broken, pytest.raises(InvalidRequest) as refused:
            await pool.prepare_item(broken, b"{}", "a" * 64)
        assert refused.value.status in (400, 415)
        assert pool.preparer_pids == before
        assert pool.stats().num_failed == 3


@pytest.mark.parametrize("header_bytes", [200_000, 2 << 20, MAX_HEADER_BYTES])
async def test_header_up_to_the_limit_passes(arena, encoded, header_bytes):
    async with running(make_pool(arena)) as pool:
        with await pool.prepare_item(encoded, options(header_bytes=header_bytes), "b" * 64) as pin:
            assert len(pin.value.header) == header_bytes


async def test_header_over_the_limit_fails_only_its_job_by_name(arena, encoded):
    async with running(make_pool(arena)) as pool:
        before = pool.preparer_pids
        with pytest.raises(MediaTooLarge, match=str(MAX_HEADER_BYTES)):
            await pool.prepare_item(encoded, options(header_bytes=MAX_HEADER_BYTES + 1), "a" * 64)
        (await pool.prepare_item(encoded, b"{}", "b" * 64)).release()
        assert pool.preparer_pids == before


async def test_options_too_large_for_a_frame_fail_only_their_job(arena, encoded):
    async with running(make_pool(arena)) as pool:
        before = pool.preparer_pids
        with pytest.raises(PreparationFailed):
            await pool.prepare_item(encoded, options(padding="x" * 2 * MAX_HEADER_BYTES), "a" * 64)
        (await pool.prepare_item(encoded, b"{}", "b" * 64)).release()
        assert pool.preparer_pids == before


async def test_unexpected_exception_fails_only_its_job_and_preparer(arena, encoded):
    async with running(make_pool(arena)) as pool:
        (before,) = pool.preparer_pids

        arena.publish_errors.append(TypeError("a bug"))
        with pytest.raises(PreparationFailed):
            await pool.prepare_item(encoded, b"{}", "a" * 64)
        await eventually(lambda: pool.stats().num_alive == 1)
        (await pool.prepare_item(encoded, b"{}", "b" * 64)).release()
        assert not is_running(before)
        assert pool.stats().num_forkserver_restarts == 0


async def test_exception_outside_of_jobs_restarts_media_preparation(arena, encoded, fork_errors):
    async with running(make_pool(arena)) as pool:
        fork_errors.append(RuntimeError("a bug"))
        (killed,) = pool.preparer_pids
        os.kill(killed, signal.SIGKILL)
        await eventually(lambda: pool.stats().num_alive == 1 and pool.preparer_pids != (killed,), timeout_s=15)
        (await pool.prepare_item(encoded, b"{}", "b" * 64)).release()
        assert pool.stats().num_forkserver_restarts == 1


async def test_full_arena_fails_the_job_and_the_preparer_continues(arena, encoded):
    async with running(make_pool(arena)) as pool:
        with arena.reserve(arena.stats().largest_hole_bytes - 4096), pytest.raises(ArenaFull):
            await pool.prepare_item(encoded, b"{}", "a" * 64)
        (await pool.prepare_item(encoded, b"{}", "a" * 64)).release()
        assert pool.stats().num_restarts == 0


async def test_duplicate_feature_returns_a_pin_on_the_first(arena, encoded):
    async with running(make_pool(arena)) as pool:
        first = await pool.prepare_item(encoded, b"{}", "a" * 64)
        second = await pool.prepare_item(encoded, b"{}", "a" * 64)
        with first, second:
            assert second.range == first.range


async def test_job_over_the_queue_limit_is_rejected(arena, encoded):
    async with running(make_pool(arena, queue_limit=2)) as pool:
        jobs = [asyncio.create_task(pool.prepare_item(encoded, options(sleep_s=0.2), f"{n:064}")) for n in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(MediaOverloaded) as caught:
            await pool.prepare_item(encoded, b"{}", "f" * 64)
        assert caught.value.retry_after_s == 1
        for pin in await asyncio.gather(*jobs):
            pin.release()


async def test_refusal_says_how_long_the_queued_items_will_take(arena, encoded):
    async with running(make_pool(arena, queue_limit=4)) as pool:
        (await pool.prepare_item(encoded, options(sleep_s=1.2), "a" * 64)).release()  # so long do they take
        jobs = [asyncio.create_task(pool.prepare_item(encoded, options(sleep_s=1.2), f"{n:064}")) for n in range(5)]
        await eventually(lambda: (pool.stats().num_busy, pool.stats().num_queued) == (1, 4))
        queue_s = pool.stats().queue_s
        with pytest.raises(MediaOverloaded) as caught:
            await pool.prepare_item(encoded, b"{}", "f" * 64)
        assert 1 < queue_s <= caught.value.retry_after_s < queue_s + 1
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)


async def test_job_not_taken_in_time_is_rejected(arena, encoded):
    async with running(make_pool(arena, queue_timeout_s=0.1)) as pool:
        first = asyncio.create_task(pool.prepare_item(encoded, options(sleep_s=1.5), "a" * 64))
        await eventually(lambda: pool.stats().num_busy == 1)
        with pytest.raises(MediaOverloaded):
            await pool.prepare_item(encoded, b"{}", "b" * 64)
        (await first).release()


async def test_cancelled_waiting_job_is_dropped(arena, encoded):
    async with running(make_pool(arena)) as pool:
        first = asyncio.create_task(pool.prepare_item(encoded, options(sleep_s=1), "a" * 64))
        await eventually(lambda: pool.stats().num_busy == 1)
        second = asyncio.create_task(pool.prepare_item(encoded, b"{}", "b" * 64))
        await eventually(lambda: pool.stats().num_queued == 1)
        second.cancel()
        (await first).release()
        (await pool.prepare_item(encoded, b"{}", "c" * 64)).release()  # would come after the second
        assert second.cancelled()
        assert not arena.contains("b" * 64)


async def test_cancelled_job_that_is_nearly_done_is_cached(arena, monkeypatch):
    monkeypatch.setattr("medialane.prepare.pool.ABANDONED_S", 4.0)
    async with running(make_pool(arena)) as pool:
        with put(arena, png()) as source:
            job = asyncio.create_task(pool.prepare_item(source, options(sleep_s=1), "a" * 64))
            await eventually(lambda: pool.stats().num_busy == 1)
            job.cancel()
            await asyncio.wait([job])
        assert job.cancelled()
        await eventually(lambda: arena.contains("a" * 64))
        await eventually(lambda: arena.stats().num_leases == 0)


@pytest.mark.parametrize("fault", ["none", "hang"])
async def test_cancelled_running_job_is_stopped_and_frees_its_preparer(arena, encoded, fault):
    """Long before its timeout: no caller needs its result."""
    async with running(make_pool(arena, image_timeout_s=60.0)) as pool:
        with put(arena, png()) as source:
            job = asyncio.create_task(pool.prepare_item(source, options(sleep_s=30, fault=fault), "a" * 64))
            await eventually(lambda: pool.stats().num_busy == 1)
            waiting = asyncio.create_task(pool.prepare_item(encoded, b"{}", "b" * 64))
            job.cancel()
            async with asyncio.timeout(10):
                (await waiting).release()
        assert job.cancelled()
        assert pool.stats().num_restarts == 1
        assert not arena.contains("a" * 64)
        assert arena.stats().num_leases == 1, "only the fixture's own"


async def test_probed_item_is_opened_and_leaves_no_entry(arena, encoded):
    async with running(make_pool(arena)) as pool:
        assert await pool.probe_item(encoded) is None
        with put(arena, png()[:20]) as broken, pytest.raises(InvalidImage):
            await pool.probe_item(broken)
        assert pool.stats().num_restarts == 0
        stats = arena.stats()
        assert (stats.num_entries, stats.num_reservations) == (2, 0), "the files alone"


async def test_pool_without_a_processor_opens_items_and_processes_none(arena, encoded):
    """Stage `url`."""
    config = PrepareConfig(num_preparers=1, start_timeout_s=15.0)
    pool = PreparerPool(
        config,
        factory=NO_PROCESSOR_FACTORY,
        factory_config=b"{}",
        arena=arena,
        media=MediaConfig(),
        environment=os.environ,
    )
    async with running(pool):
        await pool.probe_item(encoded)
        with pytest.raises(UnsupportedMediaType):
            await pool.prepare_item(encoded, b"{}", "a" * 64)


async def test_feature_larger_than_the_arena_is_rejected_permanently(arena, encoded):
    async with running(make_pool(arena)) as pool:
        side = int((arena.size_bytes / 12) ** 0.5)  # three float32 a pixel, and its encoded bytes beside it
        with put(arena, png(side, side)) as source, pytest.raises(MediaTooLarge) as refused:
            await pool.prepare_item(source, b"{}", "a" * 64)
        assert refused.value.status == 413
        (await pool.prepare_item(encoded, b"{}", "b" * 64)).release()
        assert pool.stats().num_restarts == 0


async def test_caller_cancelled_at_completion_leaks_no_pin(arena, encoded):
    async with running(make_pool(arena)) as pool:
        for n in range(20):
            job = asyncio.create_task(pool.prepare_item(encoded, b"{}", f"{n:064}"))
            await eventually(lambda: arena.contains(f"{n:064}"))  # noqa: B023 - awaited before the next turn
            job.cancel()
            await asyncio.wait([job])
            if not job.cancelled():
                job.result().release()
        await eventually(lambda: arena.stats().num_leases == 1)


async def test_preparer_is_replaced_after_its_maximum_jobs(arena, encoded):
    async with running(make_pool(arena, max_jobs_per_preparer=2)) as pool:
        pids = set()
        for n in range(5):
            await eventually(lambda: pool.stats().num_alive == 1)
            pids.update(pool.preparer_pids)
            (await pool.prepare_item(encoded, b"{}", f"{n:064}")).release()
        assert len(pids) == 3
        assert pool.stats().num_restarts == 0


async def test_start_that_is_cancelled_leaves_no_unretrieved_exception(arena, caplog):
    """SIGTERM while the processor is loaded."""
    pool = make_pool(arena, SLOW_START)
    starting = asyncio.create_task(pool.start())
    await eventually(children)
    starting.cancel()
    await asyncio.wait([starting])
    del pool, starting
    gc.collect()
    assert "never retrieved" not in caplog.text
    assert not children()


async def test_preparer_that_has_opened_a_file_is_replaced_in_time_and_no_job_waits_for_it(arena, encoded, monkeypatch):
    """A takeover by a hostile file ends, also while nothing else is asked for."""
    async with running(make_pool(arena, num_preparers=2, max_preparer_age_s=0.5)) as pool:
        before = set(pool.preparer_pids)
        (await pool.prepare_item(encoded, b"{}", "a" * 64)).release()
        await eventually(lambda: len(before & set(pool.preparer_pids)) == 1, "the one that was used")
        await eventually(lambda: not [pid for pid in before - set(pool.preparer_pids) if is_running(pid)])
        await eventually(lambda: (pool.stats().num_alive, pool.degradation) == (2, None))
        assert pool.stats().num_restarts == 0
        (unused,) = before & set(pool.preparer_pids)
        for number in range(20):  # busy all the time
            jobs = [pool.prepare_item(encoded, options(sleep_s=0.05), f"{number}{n:063}") for n in range(3)]
            for pin in await asyncio.gather(*jobs):
                pin.release()
            if unused not in pool.preparer_pids:
                break
        assert unused not in pool.preparer_pids
        assert (pool.stats().num_failed, pool.stats().num_restarts) == (0, 0)


async def test_preparer_that_is_never_idle_is_replaced_in_time(arena, encoded):
    async with running(make_pool(arena, max_preparer_age_s=0.2)) as pool:
        (first,) = pool.preparer_pids
        jobs = [asyncio.create_task(pool.prepare_item(encoded, options(sleep_s=0.05), f"{n:064}")) for n in range(60)]
        await eventually(lambda: pool.preparer_pids not in ((), (first,)))
        assert len(jobs) - pool.stats().num_done > 10, "while jobs are waiting"
        for pin in await asyncio.gather(*jobs):
            pin.release()


async def test_successor_that_cannot_be_forked_is_tried_again_and_leaves_its_predecessor(
    arena, encoded, fork_errors, monkeypatch
):
    monkeypatch.setattr(preparers, "SUCCESSOR_RETRY_S", 0.1)
    async with running(make_pool(arena, max_preparer_age_s=0.1)) as pool:
        fork_errors += ["no memory"] * 2
        (victim,) = pool.preparer_pids
        (await pool.prepare_item(encoded, b"{}", "a" * 64)).release()
        await eventually(lambda: not fork_errors)
        assert pool.preparer_pids == (victim,)
        await eventually(lambda: pool.stats().num_alive == 1 and pool.preparer_pids != (victim,))
        (await pool.prepare_item(encoded, b"{}", "b" * 64)).release()


async def test_idle_preparer_that_dies_is_replaced(arena, encoded):
    async with running(make_pool(arena)) as pool:
        (await pool.prepare_item(encoded, b"{}", "a" * 64)).release()
        (victim,) = pool.preparer_pids
        os.kill(victim, signal.SIGKILL)
        await eventually(lambda: pool.stats().num_alive == 1 and pool.preparer_pids != (victim,))
        (await pool.prepare_item(encoded, b"{}", "b" * 64)).release()


async def test_preparers_dying_before_their_first_job_are_replaced_with_backoff(arena):
    async with running(make_pool(arena)) as pool:
        started, killed = time.monotonic(), []
        for _ in range(4):
            await eventually(lambda gone=set(killed): set(pool.preparer_pids) - gone)
            killed += pool.preparer_pids
            os.kill(killed[-1], signal.SIGKILL)
        assert time.monotonic() - started > 0.1 + 0.2 + 0.4


async def test_spare_takes_over_from_a_killed_forkserver_before_waiting_jobs_notice(arena, encoded):
    async with running(make_pool(arena, SLOW_START, num_preparers=2)) as pool:
        await eventually(lambda: pool.spare_pid is not None)
        old = pool.preparer_pids
        lost = [asyncio.create_task(pool.prepare_item(encoded, options(sleep_s=0.5), f"{n:064}")) for n in range(2)]
        await eventually(lambda: pool.stats().num_busy == 2)
        waiting = asyncio.create_task(pool.prepare_item(encoded, b"{}", "b" * 64))
        (forkserver,) = children()
        killed_at = time.monotonic()
        os.kill(forkserver, signal.SIGKILL)
        await eventually(lambda: pool.degradation is not None)
        for job in (*lost, waiting):
            (await job).release()
        await eventually(lambda: pool.degradation is None)
        assert time.monotonic() - killed_at < SLOW_START_S
        assert pool.stats().num_forkserver_restarts == 1
        assert not [pid for pid in old if is_running(pid)]


async def test_every_spare_that_takes_over_has_a_spare(arena, encoded):
    async with running(make_pool(arena, SLOW_START)) as pool:
        started = time.monotonic()
        pids = children()
        for number in range(3):
            await eventually(lambda: pool.spare_pid is not None)
            pids.add(used := pool.spare_pid)
            os.kill(forkserver_of(pool.preparer_pids[0]), signal.SIGKILL)
            await eventually(lambda: pool.degradation is None and forkserver_of(pool.preparer_pids[0]) == used)
            (await pool.prepare_item(encoded, b"{}", f"{number:064}")).release()
        assert time.monotonic() - started < SLOW_START_S
        await eventually(lambda: pool.spare_pid is not None)
        pids.add(pool.spare_pid)
    wait_until(lambda: not any(is_running(pid) for pid in pids))


async def test_dead_spare_is_replaced_without_affecting_jobs(arena, encoded):
    async with running(make_pool(arena)) as pool:
        await eventually(lambda: pool.spare_pid is not None)
        before, first = pool.preparer_pids, pool.spare_pid
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: pool.spare_pid not in (None, first))
        (await pool.prepare_item(encoded, b"{}", "a" * 64)).release()
        assert pool.preparer_pids == before
        assert pool.degradation is None


async def test_simultaneous_death_of_forkserver_and_spare_fails_jobs_and_both_are_replaced(arena, encoded):
    async with running(make_pool(arena, num_preparers=2)) as pool:
        await eventually(lambda: pool.spare_pid is not None)
        job = asyncio.create_task(pool.prepare_item(encoded, options(sleep_s=3), "a" * 64))
        await eventually(lambda: pool.stats().num_busy == 1)
        (forkserver,) = children()
        os.kill(pool.spare_pid, signal.SIGKILL)
        os.kill(forkserver, signal.SIGKILL)
        with pytest.raises(Unavailable):
            await job
        with pytest.raises(Unavailable):
            await pool.prepare_item(encoded, b"{}", "b" * 64)
        assert "restarting" in pool.degradation
        await eventually(lambda: pool.degradation is None, timeout_s=10)
        (await pool.prepare_item(encoded, b"{}", "c" * 64)).release()


async def test_close_during_cleanup_of_a_dead_preparer_releases_its_job(arena, encoded):
    for _ in range(5):
        async with running(make_pool(arena)) as pool:
            with pytest.raises(PreparerCrashed):
                await pool.prepare_item(encoded, options(fault="kill"), "a" * 64)
        assert arena.stats().num_leases == 1


async def test_hanging_forkserver_is_replaced(arena, encoded, monkeypatch):
    monkeypatch.setattr(forkserver_process, "FORK_TIMEOUT_S", 1.0)
    async with running(make_pool(arena)) as pool:
        await eventually(lambda: pool.spare_pid is not None)
        (forkserver,) = children()
        os.kill(forkserver, signal.SIGSTOP)
        with pytest.raises(PreparerCrashed):
            await pool.prepare_item(encoded, options(fault="kill"), "a" * 64)
        await eventually(lambda: pool.stats().num_forkserver_restarts == 1, timeout_s=10)
        monkeypatch.undo()
        await eventually(lambda: pool.stats().num_alive == 1, timeout_s=10)
        (await pool.prepare_item(encoded, b"{}", "b" * 64)).release()
        assert not is_running(forkserver)


@pytest.fixture
def _impatient(monkeypatch):
    """A process that hangs is found after two seconds instead of ten."""
    monkeypatch.setattr(heartbeat, "MAX_SILENT_S", 2.0)


@pytest.mark.usefixtures("_impatient")
async def test_stopped_forkserver_is_found_without_a_request_and_its_jobs_go_on_at_the_spare(arena, encoded):
    async with running(make_pool(arena)) as pool:
        await eventually(lambda: pool.spare_pid is not None)
        spare, (forkserver,) = pool.spare_pid, children()
        job = asyncio.create_task(pool.prepare_item(encoded, options(sleep_s=4), "a" * 64))
        await eventually(lambda: pool.stats().num_busy == 1)
        os.kill(forkserver, signal.SIGSTOP)
        await eventually(lambda: pool.stats().num_forkserver_restarts == 1, timeout_s=10)
        await eventually(lambda: pool.degradation is None and not is_running(forkserver), timeout_s=5)
        assert pool.forkserver_pids[0] == spare
        (await job).release()


@pytest.mark.usefixtures("_impatient")
async def test_stopped_spare_is_replaced_before_it_is_needed(arena, encoded):
    async with running(make_pool(arena)) as pool:
        await eventually(lambda: pool.spare_pid is not None)
        spare = pool.spare_pid
        os.kill(spare, signal.SIGSTOP)
        await eventually(lambda: pool.spare_pid not in (spare, None), timeout_s=10)
        assert not is_running(spare)
        os.kill(pool.forkserver_pids[0], signal.SIGKILL)
        await eventually(lambda: pool.stats().num_forkserver_restarts == 1, timeout_s=5)
        (await pool.prepare_item(encoded, b"{}", "a" * 64)).release()


async def test_disabled_pool_is_not_impaired(arena):
    pool = make_pool(arena)
    assert pool.degradation is None
    async with running(pool):
        assert pool.degradation is None
    assert pool.degradation is None


async def test_killed_preparer_is_an_impairment_until_it_is_replaced(arena):
    async with running(make_pool(arena, num_preparers=2)) as pool:
        os.kill(pool.preparer_pids[0], signal.SIGKILL)
        await eventually(lambda: pool.degradation == "1 of 2 preparers are running")
        await eventually(lambda: pool.degradation is None)


async def test_close_fails_running_and_waiting_jobs_immediately(arena, encoded):
    async with running(make_pool(arena)) as pool:
        jobs = [asyncio.create_task(pool.prepare_item(encoded, options(sleep_s=30), f"{n:064}")) for n in range(2)]
        await eventually(lambda: pool.stats().num_busy == 1)
        started = time.monotonic()
        await pool.close()
        assert time.monotonic() - started < 10
        for job in jobs:
            with pytest.raises(Unavailable):
                await job
        with pytest.raises(Unavailable):
            await pool.prepare_item(encoded, b"{}", "f" * 64)


@pytest.mark.parametrize(
    ("factory_config", "settings", "message"),
    [
        (b'{"refusal": "no such model"}', {}, "no such model"),
        (b'{"bug": true}', {}, "see its log"),
        (b'{"num_threads": 2}', {}, "has 3 threads"),
        (b'{"warm_s": 30}', {"start_timeout_s": 0.5}, "start_timeout_s"),
    ],
)
async def test_failed_start_reports_its_reason_and_leaves_nothing(arena, factory_config, settings, message):
    pool = make_pool(arena, factory_config, **settings)
    with pytest.raises(StartupFailed, match=message):
        await pool.start()
    assert not children()


async def test_jobs_wait_while_the_first_processor_is_loaded(arena, encoded):
    loaded = []
    pool = make_pool(arena, b'{"warm_s": 0.5}', on_loaded=lambda: loaded.append(dict(pool.processor_settings)))
    starting = asyncio.create_task(pool.start())
    await eventually(lambda: pool.degradation is not None)
    assert pool.degradation == "the model's processor is being loaded"
    pin = await pool.prepare_item(encoded, b"{}", "a" * 64)
    pin.release()
    await starting
    assert loaded == [dict(pool.processor_settings)]
    assert pool.degradation is None
    await pool.close()


async def test_jobs_fail_if_the_first_processor_cannot_be_loaded(arena, encoded):
    pool = make_pool(arena, b'{"refusal": "no such model"}')
    starting = asyncio.create_task(pool.start())
    await eventually(lambda: pool.degradation is not None)
    with pytest.raises(Unavailable):
        await pool.prepare_item(encoded, b"{}", "a" * 64)
    with pytest.raises(StartupFailed):
        await starting


async def test_unmappable_arena_fails_the_start_clearly(arena):
    pool = make_pool(arena)
    arena.path.rename(arena.path.with_suffix(".moved"))
    try:
        with pytest.raises(StartupFailed, match="a preparer failed to start"):
            await pool.start()
    finally:
        arena.path.with_suffix(".moved").rename(arena.path)
    assert not children()


async def test_fifty_crashes_leak_no_descriptor_or_range(arena, encoded):
    async with running(make_pool(arena)) as pool:
        (await pool.prepare_item(encoded, b"{}", "a" * 64)).release()
        await eventually(lambda: pool.spare_pid is not None)  # it has descriptors, too
        gc.collect()
        before, used = len(os.listdir("/proc/self/fd")), arena.stats().free_bytes
        for number in range(25):
            with pytest.raises(PreparerCrashed, match="twice"):
                await pool.prepare_item(encoded, options(fault="kill"), f"{number:064}")
        await eventually(lambda: pool.stats().num_restarts == 50 and pool.stats().num_alive == 1)
        assert len(os.listdir("/proc/self/fd")) == before
        assert arena.stats().free_bytes == used


async def test_preparers_hold_only_their_own_socket_and_not_the_arena_lock(arena):
    async with running(make_pool(arena, num_preparers=2)) as pool:
        for pid in pool.preparer_pids:
            links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
            assert len([link for link in links if link.startswith("socket:")]) == 1
            assert not [link for link in links if "pidfd" in link or "eventpoll" in link]


def test_pool_works_on_uvloop(arena, encoded):
    async def main():
        async with running(make_pool(arena)) as pool:
            with pytest.raises(PreparerCrashed):
                await pool.prepare_item(encoded, options(fault="kill"), "b" * 64)
            (await pool.prepare_item(encoded, b"{}", "a" * 64)).release()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


OWNER = """
import asyncio, os, sys
from medialane.arena import Arena, ArenaConfig
from medialane.media import MediaConfig
from medialane.prepare import PrepareConfig, PreparerPool

async def main():
    arena = Arena.create(ArenaConfig(size_bytes=16 << 20))
    pool = PreparerPool(PrepareConfig(num_preparers=2), factory=sys.argv[1], factory_config=sys.argv[2].encode(),
                        arena=arena, media=MediaConfig(), environment=os.environ)
    print(arena.path, flush=True)
    await pool.start()
    while pool.spare_pid is None:
        await asyncio.sleep(0.01)  # time: between two polls
    print(*pool.preparer_pids, flush=True)
    await asyncio.sleep(60)  # time: a leftover of a failed test ends by itself

asyncio.run(main())
"""


@pytest.mark.parametrize("factory_config", ["{}", '{"warm_s": 50}'])
def test_no_process_survives_a_killed_owner(factory_config):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, FACTORY, factory_config], stdout=subprocess.PIPE, text=True)
    with owner:
        path = Path(owner.stdout.readline().strip())
        try:
            others = set()
            if factory_config == "{}":
                others.update(int(pid) for pid in owner.stdout.readline().split())
                assert len(others) == 2
                assert len(descendants(owner.pid)) == 4  # and fork server and spare
            listing = Path(f"/proc/{owner.pid}/task/{owner.pid}/children")
            wait_until(lambda: listing.read_text().strip())
            others.update(descendants(owner.pid))
            assert all(is_running(pid) for pid in others)
        finally:
            owner.kill()
            owner.wait()
            path.unlink()
    wait_until(lambda: not any(is_running(pid) for pid in others))
