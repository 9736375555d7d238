"""Concurrent work on the items of one request."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from medialane.core.errors import MedialaneError

T = TypeVar("T")


async def gather_or_cancel(work: Sequence[Coroutine[Any, Any, T]]) -> tuple[T, ...]:
    """Await all and return their results in order. The first MedialaneError cancels the others and is raised."""
    if len(work) == 1:
        return (await work[0],)
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one) for one in work]
    except* MedialaneError as failed:
        raise _first(failed) from None
    return tuple(task.result() for task in running)


def _first(failed: BaseExceptionGroup[MedialaneError]) -> MedialaneError:
    error: BaseException = failed
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, MedialaneError)  # noqa: S101 - the group holds nothing else
    return error
