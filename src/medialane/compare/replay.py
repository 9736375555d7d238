"""Sends the requests of a turn: at the times of the traffic, or some at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from medialane.compare.client import CompareClient
from medialane.compare.reply import Reply
from medialane.compare.traffic import Traffic, TrafficRequest, UnusableLine

#: Requests that may be in flight at the times of the traffic; then it is sent late, which the report says.
MAX_IN_FLIGHT = 2000


@dataclass(frozen=True)
class Pace:
    """`concurrency` requests at a time; without it, at the times of the traffic, `speed` times as fast."""

    speed: float = 1.0
    concurrency: int | None = None

    def __str__(self) -> str:
        if self.concurrency is not None:
            return f"{self.concurrency} at a time"
        return "at the times of the traffic" + (f", {self.speed:g} times as fast" if self.speed != 1 else "")


async def replay(
    traffic: Traffic,
    numbers: Sequence[int],
    client: CompareClient,
    pace: Pace,
    replied: Callable[[Reply], None],
) -> None:
    """Send the requests of these numbers, and pass on each reply. Cancelling it ends all requests."""
    began = time.perf_counter()
    pending = iter(numbers)
    if pace.concurrency is not None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(pace.concurrency):
                tasks.create_task(_one_after_the_other(traffic, pending, client, began, replied))
        return
    first = (traffic.requests[numbers[0]].at_s or 0.0) if numbers else 0.0
    free = asyncio.Semaphore(MAX_IN_FLIGHT)
    async with asyncio.TaskGroup() as tasks:
        for number in pending:
            request = traffic.requests[number]
            made = await _made(request, client)
            due = began + ((request.at_s or 0.0) - first) / pace.speed
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await free.acquire()
            late_s = max(0.0, time.perf_counter() - due)

            async def send(number: int = number, made: _Made | Reply = made, late_s: float = late_s) -> None:
                try:
                    reply = await _sent(made, client, number, began)
                    replied(msgspec.structs.replace(reply, late_s=round(late_s, 4)))
                finally:
                    free.release()

            tasks.create_task(send())


async def _one_after_the_other(
    traffic: Traffic,
    pending: Iterator[int],
    client: CompareClient,
    began: float,
    replied: Callable[[Reply], None],
) -> None:
    for number in pending:
        made = await _made(traffic.requests[number], client)
        replied(await _sent(made, client, number, began))


#: Path and content of a request.
_Made = tuple[str, Mapping[str, Any]]


async def _made(request: TrafficRequest, client: CompareClient) -> _Made | Reply:
    """Return a request to be sent, or a reply that says why it cannot be."""

    def make() -> _Made:
        ask = request.make()
        return ask.path, client.asking.content(ask)

    try:
        return await asyncio.to_thread(make)
    except UnusableLine as error:
        return Reply(0, 0, 0.0, 0.0, error=str(error))


async def _sent(made: _Made | Reply, client: CompareClient, number: int, began: float) -> Reply:
    if isinstance(made, Reply):
        return msgspec.structs.replace(made, number=number)
    path, content = made
    return await client.ask(path, content, number, began=began)
