"""A process exits when an essential task has ended."""

import asyncio

import pytest

from medialane.cli.serving import EssentialTasks, unless_set


async def returns():
    return None


async def raises():
    raise RuntimeError("a bug")


async def is_cancelled():
    raise asyncio.CancelledError


@pytest.mark.parametrize("work", [returns, raises, is_cancelled])
async def test_ended_task_stops_the_process_and_is_named(work, caplog):
    stop = asyncio.Event()
    async with EssentialTasks(stop) as tasks, asyncio.timeout(5):
        tasks.start(asyncio.Event().wait(), "another")
        tasks.start(work(), "connecting to workers")
        await stop.wait()
    assert tasks.failed
    assert caplog.text.count("connecting to workers exited unexpectedly") == 1
    assert "another" not in caplog.text
    assert ("a bug" in caplog.text) == (work is raises)


async def test_stop_cancels_every_task_without_failure(caplog):
    stop, ended = asyncio.Event(), asyncio.Event()

    async def run():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()

    async with EssentialTasks(stop) as tasks:
        tasks.start(run(), "worker links")
        await asyncio.sleep(0)
    assert ended.is_set()
    assert not tasks.failed
    assert not caplog.records


async def test_failure_during_stop_is_logged(caplog):
    async def run():
        try:
            await asyncio.Event().wait()
        finally:
            raise RuntimeError("cannot close")

    async with EssentialTasks(asyncio.Event()) as tasks:
        tasks.start(run(), "worker links")
        await asyncio.sleep(0)
    assert not tasks.failed
    assert "worker links failed while it was stopped" in caplog.text


async def test_work_finished_before_the_stop_returns_its_result():
    async def work():
        return 7

    assert await unless_set(asyncio.Event(), work()) == 7


async def test_work_failing_before_the_stop_raises():
    with pytest.raises(RuntimeError, match="a bug"):
        await unless_set(asyncio.Event(), raises())


async def test_stop_cancels_the_work_and_waits_for_its_end():
    stop, unwound = asyncio.Event(), []

    async def work():
        stop.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            unwound.append(True)

    assert await unless_set(stop, work()) is None
    assert unwound == [True]


async def test_failure_during_cancellation_is_raised():
    stop = asyncio.Event()

    async def work():
        stop.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise RuntimeError("cannot be undone")

    with pytest.raises(RuntimeError, match="cannot be undone"):
        await unless_set(stop, work())
