"""Sends the requests of a turn: at the times of the traffic, or some at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from medialane.tools.compare.client import CompareClient
from medialane.tools.compare.reply import Reply
from medialane.tools.compare.traffic import Traffic, UnusableLine

#: Requests that may be in flight at the times of the traffic, below the usual limit of open files; more are sent late,
#: which the report says.
MAX_IN_FLIGHT = 800


@dataclass(frozen=True)
class Pace:
    """`concurrency` requests at a time; without it, at the times of the traffic, `speed` times as fast."""

    speed: float = 1.0
    concurrency: int | None = None

    def __str__(self) -> str:
        if self.concurrency is not None:
            return f"{self.concurrency} at a time"
        return "at the times of the traffic" + (f", {self.speed:g} times as fast" if self.speed != 1 else "")


#: Path and content of a request.
_Made = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Replay:
    """One turn of the traffic at one server; each reply is passed to `replied`."""

    traffic: Traffic
    client: CompareClient
    pace: Pace
    replied: Callable[[Reply], None]

    async def run(self, numbers: Sequence[int]) -> None:
        """Send the requests of these numbers. Cancelling it ends all requests. Raises what `replied` raises."""
        began, pending = time.perf_counter(), iter(numbers)
        try:
            async with asyncio.TaskGroup() as tasks:
                if self.pace.concurrency is None:
                    await self._at_their_times(numbers, began, tasks)
                for _ in range(self.pace.concurrency or 0):
                    tasks.create_task(self._one_after_the_other(pending, began))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _one_after_the_other(self, pending: Iterator[int], began: float) -> None:
        for number in pending:
            self.replied(await self._sent(await self._made(number), number, began))

    async def _at_their_times(self, numbers: Sequence[int], began: float, tasks: asyncio.TaskGroup) -> None:
        times = [self.traffic.requests[number].at_s or 0.0 for number in numbers]
        free = asyncio.Semaphore(MAX_IN_FLIGHT)
        for number, at_s in zip(numbers, times, strict=True):
            made = await self._made(number)
            due = began + (at_s - times[0]) / self.pace.speed
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await free.acquire()
            sending = tasks.create_task(self._send(made, number, began, due=due))
            sending.add_done_callback(lambda _: free.release())

    async def _send(self, made: _Made | Reply, number: int, began: float, *, due: float) -> None:
        late_s = max(0.0, time.perf_counter() - due)
        reply = await self._sent(made, number, began)
        self.replied(msgspec.structs.replace(reply, late_s=round(late_s, 4)))

    async def _sent(self, made: _Made | Reply, number: int, began: float) -> Reply:
        if isinstance(made, Reply):
            return made
        path, content = made
        return await self.client.ask(path, content, number, began=began)

    async def _made(self, number: int) -> _Made | Reply:
        """Return a request to be sent, or a reply that says why it cannot be."""

        def make() -> _Made:
            ask = self.traffic.requests[number].make()
            return ask.path, self.client.content(ask)

        try:
            return await asyncio.to_thread(make)
        except UnusableLine as error:
            return Reply(number, 0, 0.0, 0.0, error=str(error))
