"""Waiting for several coroutines or streams, none of which runs on when the wait is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def first_of(*waits: Awaitable[object]) -> None:
    """Wait until one of them ends, and raise its error if it has one; cancel the others, but for what is shielded."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def gather_or_cancel(work: Sequence[Coroutine[Any, Any, T]]) -> tuple[T, ...]:
    """Await all and return their results in order. The first error cancels the others and is raised as it is."""
    if len(work) == 1:
        return (await work[0],)
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one) for one in work]
    except ExceptionGroup as group:
        first = group.exceptions[0]
    else:
        return tuple(task.result() for task in running)
    try:
        raise first
    finally:
        del first  # its traceback has this frame


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yield what any of the streams yields, as it comes. The first error closes all, and is raised. Each is one step
    ahead of the reader at most."""
    if len(streams) == 1:
        async for item in streams[0]:
            yield item
        return
    steps: dict[asyncio.Future[T], AsyncGenerator[T, None]] = {}
    try:
        steps |= {_step(stream): stream for stream in streams}
        while steps:
            ended, _ = await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED)
            for step in ended:
                stream = steps.pop(step)
                try:
                    item = step.result()
                except StopAsyncIteration:
                    continue
                steps[_step(stream)] = stream
                yield item
    finally:
        for step in steps:
            step.cancel()
        if steps:
            await asyncio.wait(steps)
        for stream in streams:
            await stream.aclose()


def _step(stream: AsyncGenerator[T, None]) -> asyncio.Future[T]:
    return asyncio.ensure_future(anext(stream))
