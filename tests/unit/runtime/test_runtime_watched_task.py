"""Background tasks that must live."""

import asyncio

import pytest

from medialane.runtime.tasks import FAILING_S, WatchedTask, has_failing_tasks
from waiting import eventually


@pytest.mark.parametrize("error", [None, RuntimeError("can't start new thread")])
async def test_task_that_ends_is_logged_reported_and_started_again(error, caplog, clock):
    starts = []

    async def work():
        starts.append(error)
        if len(starts) < 3:
            if error is not None:
                raise error
            return
        await asyncio.Event().wait()

    async with WatchedTask(work, "the reader", pause_s=0.01, clock=clock):
        assert not has_failing_tasks()
        await eventually(lambda: len(starts) == 3)
        assert has_failing_tasks()
        assert caplog.text.count("the reader has ended unexpectedly") == 2
        clock.now += FAILING_S
        assert not has_failing_tasks(), "it has run for long enough since"
    assert len(starts) == 3


async def test_closed_task_is_neither_restarted_nor_failing():
    task = WatchedTask(asyncio.Event().wait, "the reader")
    await asyncio.sleep(0)
    await task.close()
    await task.close()
    assert not has_failing_tasks()
