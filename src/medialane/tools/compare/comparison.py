"""A comparison: two servers in turns, started here one at a time or running already, each sent the whole traffic."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from medialane.runtime.private_files import private
from medialane.runtime.resources import used_cpu_s
from medialane.tools.check.servers import CheckProgress, Launch, Start, medialane_process, plain_process
from medialane.tools.compare.client import CompareClient, Reply
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

    async def run(self) -> None:
        """Send all requests. Cancelling it ends them. Raises what `replied` raises."""
        began, pending = time.perf_counter(), iter(range(len(self.traffic.requests)))
        try:
            async with asyncio.TaskGroup() as tasks:
                if self.pace.concurrency is None:
                    await self._at_their_times(began, tasks)
                for _ in range(self.pace.concurrency or 0):
                    tasks.create_task(self._one_after_the_other(pending, began))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _one_after_the_other(self, pending: Iterator[int], began: float) -> None:
        for number in pending:
            self.replied(await self._sent(await self._made(number), number, began))

    async def _at_their_times(self, began: float, tasks: asyncio.TaskGroup) -> None:
        free = asyncio.Semaphore(MAX_IN_FLIGHT)
        for number, request in enumerate(self.traffic.requests):
            made = await self._made(number)
            due = began + (request.at_s or 0.0) / self.pace.speed
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
    """`base_url` is without /v1. `process_id` is the id of the first of its processes, None if it runs elsewhere."""

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


@dataclass
class Turn:
    """What a side has made of the traffic, once. `is_whole` unless it was interrupted. `cpu_s` is the time of all
    processes of the server, None if it runs elsewhere; `counters` is by how much metrics of it have grown."""

    replies: list[Reply] = field(default_factory=list)
    is_whole: bool = False
    wall_s: float = 0.0
    cpu_s: float | None = None
    counters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrafficComparison:
    """What is compared, and how. `metrics_key` opens the metrics of medialane. `turns` are the ones that have begun, in
    order, of each side."""

    traffic: Traffic
    sides: tuple[Side, Side]
    pace: Pace
    rounds: int = 1
    as_sent: bool = False
    api_key: str = ""
    metrics_key: str = ""
    timeout_s: float = 600.0
    turns: tuple[list[Turn], list[Turn]] = field(default_factory=lambda: ([], []))

    async def run(self, folder: Path, progress: CheckProgress) -> None:
        """Run all turns; each has its replies in a file of the folder, as they come. Cancelling it keeps the turns so
        far. Raises StartupFailed."""
        _make(folder)
        await self._prepare(progress)
        for number in range(1, self.rounds + 1):
            for place, side in enumerate(self.sides):
                turn = Turn()
                with written(folder, f"turn-{number}-{place}.jsonl") as write:
                    replied = self._replied(turn, write, progress, f"{side.name}, round {number}")
                    async with side.run(number) as server, self._measured(server, turn) as client:
                        self.turns[place].append(turn)
                        await Replay(self.traffic, client, self.pace, replied).run()

    async def _prepare(self, progress: CheckProgress) -> None:
        """Make every request once: its media are kept then."""
        for number, request in enumerate(self.traffic.requests, 1):
            progress.case(number, len(self.traffic.requests), "preparing requests")
            with suppress(UnusableLine):  # it is reported in each turn
                await asyncio.to_thread(request.make)

    def _replied(
        self, turn: Turn, write: Callable[[bytes], None], progress: CheckProgress, name: str
    ) -> Callable[[Reply], None]:
        def replied(reply: Reply) -> None:
            write(msgspec.json.encode(reply))
            turn.replies.append(reply)
            progress.case(len(turn.replies), len(self.traffic.requests), name)

        return replied

    @asynccontextmanager
    async def _measured(self, server: RunningServer, turn: Turn) -> AsyncIterator[CompareClient]:
        """Yield a client of a server that is idle; measure the block for the turn, however it ends."""
        async with CompareClient.opened(
            server.base_url, api_key=self.api_key, as_sent=self.as_sent, timeout_s=self.timeout_s
        ) as client:
            await client.warm_up()
            if server.process_id is not None:
                await asyncio.sleep(_SETTLE_S)
            counters = await client.counters(self.metrics_key)
            cpu_s, began = await _cpu(server), time.perf_counter()
            try:
                yield client
                turn.is_whole = True
            finally:
                turn.wall_s = time.perf_counter() - began
                turn.cpu_s = None if cpu_s is None or (now := await _cpu(server)) is None else now - cpu_s
                after = await client.counters(self.metrics_key)
                turn.counters = {key: value - counters.get(key, 0.0) for key, value in after.items()}


def _make(folder: Path) -> None:
    with _writing(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)


@contextmanager
def written(folder: Path, name: str) -> Iterator[Callable[[bytes], None]]:
    """Yield a function that writes a line to a new file of the folder. All of them raise StartupFailed."""
    with _writing(folder):
        file = open(folder / name, "wb", buffering=0, opener=private)  # noqa: SIM115 - closed below

    def write(line: bytes) -> None:
        with _writing(folder):
            file.write(line + b"\n")

    with file:
        yield write


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Raise StartupFailed, with the folder's name, if the block cannot write."""
    try:
        yield
    except OSError as error:
        raise StartupFailed(f"--out {folder}: {error.strerror}") from error


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
