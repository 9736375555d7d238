"""A comparison: two servers in turns, started here one at a time or running already, each sent the whole traffic."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from medialane.runtime.resources import used_cpu_s
from medialane.tools.check.servers import CheckProgress, Launch, Start, medialane_process, plain_process
from medialane.tools.compare.client import CompareClient
from medialane.tools.compare.journal import Journal, Turn
from medialane.tools.compare.reply import Reply
from medialane.tools.compare.report import COUNTERS
from medialane.tools.compare.traffic import Traffic, UnusableLine
from medialane.types.errors import StartupFailed

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


_PLAIN, _OURS = "plain vLLM", "medialane"
#: More than the second for which vLLM's idle engine busy-waits after its last step (`SpinCondition.busy_loop_s`).
_SETTLE_S: Final = 1.5


class RunningServer(NamedTuple):
    """`base_url` is without /v1. `process_id` is that of the first of its processes, None if it runs elsewhere."""

    base_url: str
    process_id: int | None


@dataclass(frozen=True)
class Side:
    """`run` starts the server for the time of the block, the nth time."""

    name: str
    run: Callable[[int], AbstractAsyncContextManager[RunningServer]]


def sides_of(against: Sequence[str], launch: Launch, progress: CheckProgress) -> tuple[Side, Side]:
    """Return plain vLLM and medialane; of servers that run already, one instead of plain vLLM, or two. Raises
    StartupFailed."""
    running = [_running(each) for each in against]
    ours = Side(_OURS, partial(_started, medialane_process, launch, progress))
    match running:
        case []:
            return Side(_PLAIN, partial(_started, plain_process, launch, progress)), ours
        case [baseline]:
            return baseline, ours
        case [baseline, other]:
            return baseline, other
    raise StartupFailed("--against: at most two servers are compared")


@dataclass(frozen=True, kw_only=True)
class TrafficComparison:
    """What is compared, and how. `metrics_key` opens the metrics of medialane."""

    traffic: Traffic
    sides: tuple[Side, Side]
    pace: Pace
    rounds: int = 1
    as_sent: bool = False
    api_key: str = ""
    metrics_key: str = ""
    timeout_s: float = 600.0

    async def run(self, journal: Journal, progress: CheckProgress) -> None:
        """Run the turns that the journal does not have whole. Cancelling it keeps the replies so far. Raises
        StartupFailed."""
        await self._prepare(progress)
        for number in range(1, self.rounds + 1):
            for place, side in enumerate(self.sides):
                turn = journal.turn(place, side.name, number)
                if turn.facts.is_whole:
                    progress.note(f"{side.name}, round {number}: there are all replies")
                    continue
                async with (
                    side.run(number + turn.facts.num_parts) as server,
                    self._measured(place, server, turn, journal) as client,
                ):
                    with journal.writer(place, number) as write:
                        await self._turn(turn, client, write, progress)

    async def _prepare(self, progress: CheckProgress) -> None:
        """Make every request once: its media are kept then."""
        for number, request in enumerate(self.traffic.requests, 1):
            progress.case(number, len(self.traffic.requests), "preparing requests")
            with suppress(UnusableLine):  # it is reported in each turn
                await asyncio.to_thread(request.make)

    def turns(self, journal: Journal) -> list[list[Turn]]:
        """Return what the journal has, by side."""
        return [
            [
                turn
                for number in range(1, self.rounds + 1)
                if (turn := journal.turn(place, side.name, number)).replies or turn.facts.num_parts
            ]
            for place, side in enumerate(self.sides)
        ]

    async def _turn(
        self, turn: Turn, client: CompareClient, write: Callable[[Reply], None], progress: CheckProgress
    ) -> None:
        """Send what has no reply yet."""
        done = {reply.number for reply in turn.replies}

        def replied(reply: Reply) -> None:
            write(reply)
            done.add(reply.number)
            progress.case(len(done), len(self.traffic.requests), f"{turn.facts.side}, round {turn.facts.round}")

        numbers = [n for n in range(len(self.traffic.requests)) if n not in done]
        await Replay(self.traffic, client, self.pace, replied).run(numbers)

    @asynccontextmanager
    async def _measured(
        self, place: int, server: RunningServer, turn: Turn, journal: Journal
    ) -> AsyncIterator[CompareClient]:
        """Yield a client of a server that is idle; write the facts of the block, however it ends."""
        async with CompareClient.opened(
            server.base_url, api_key=self.api_key, as_sent=self.as_sent, timeout_s=self.timeout_s
        ) as client:
            await client.warm_up()
            if server.process_id is not None:
                await asyncio.sleep(_SETTLE_S)
            counters = await client.counters(COUNTERS, self.metrics_key)
            cpu_s, began = await _cpu(server), time.perf_counter()
            is_whole = False
            try:
                yield client
                is_whole = True
            finally:
                wall_s = time.perf_counter() - began
                used = None if cpu_s is None or (now := await _cpu(server)) is None else now - cpu_s
                after = await client.counters(COUNTERS, self.metrics_key)
                grown = {key: value - counters.get(key, 0.0) for key, value in after.items()}
                journal.end(place, turn.facts.plus(wall_s, used, grown, is_whole=is_whole))


@asynccontextmanager
async def _started(start: Start, launch: Launch, progress: CheckProgress, number: int) -> AsyncIterator[RunningServer]:
    async with start(launch, progress, number) as process:
        yield RunningServer(process.base_url.removesuffix("/v1"), process.process_id)


def _running(text: str) -> Side:
    """Read [NAME=]URL. Raises StartupFailed."""
    name, separator, url = text.rpartition("=") if "=" in text.partition("://")[0] else ("", "", text)
    url = url.rstrip("/").removesuffix("/v1")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc or (separator and not name):
        raise StartupFailed(f"--against {text}: it takes [NAME=]URL, such as vllm=http://127.0.0.1:8000")

    @asynccontextmanager
    async def run(_number: int) -> AsyncIterator[RunningServer]:
        yield RunningServer(url, None)

    return Side(name or parts.netloc, run)


async def _cpu(server: RunningServer) -> float | None:
    if server.process_id is None:
        return None
    return await asyncio.to_thread(used_cpu_s, [server.process_id])
