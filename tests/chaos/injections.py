"""How each action of a scenario is done to the processes of `serve`, and what must be so afterwards."""

import asyncio
import os
import random
import signal
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
from connections import cut
from mixed_load import MixedLoad
from openai_http import OpenAiHttp, chat, data_url, image, photo, picture, text
from process_tree import command_of, suspended
from scenario import HOARD, NOTHING, WORKERS_LOST, Injection, Scenario
from served_processes import RESTART_S, ServedProcesses

from breaking_processor import BREAKING_WIDTH, BREAKS

_LENGTH = struct.Struct(">I")
#: What a client gets for an image that ends its preparer.
POISONED = frozenset({"media_decoder_crashed", "media_decoder_timeout", "media_preparation_failed"})
_POISONS = count(1)
_LOOK_S = 0.5
#: Pictures of a hoard: each takes 9 MB of the arena.
_NUM_HOARDED = 12
_FULL = b"\0" * (1 << 20)


class WholeHost:
    """Whether `serve` has the processes that it had, and its gateways all workers; looked at now and then."""

    def __init__(self, processes: ServedProcesses, client: OpenAiHttp) -> None:
        self._processes = processes
        self._client = client
        self._before: tuple[dict[str, int], float] = ({}, 0.0)
        self._waiting: list[asyncio.Future[None]] = []

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """It is whole at the beginning."""
        self._before = await self._now()
        watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.wait([watching])

    async def wait(self, when: str) -> None:
        """Raises AssertionError if it is not whole again in time."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(RESTART_S):
                await waiting
        except TimeoutError:
            raise AssertionError(
                f"the host is not whole {when}: {await self._now()} instead of {self._before}\n"
                f"{self._processes.serve.tail()}"
            ) from None

    async def _now(self) -> tuple[dict[str, int], float]:
        """The numbers of processes, and of ready workers by all gateways."""
        num_ready = 0.0
        with suppress(aiohttp.ClientError, TimeoutError):
            num_ready = (await self._client.metrics()).value("medialane_worker_state", state="ready")
        return await self._processes.numbers(), num_ready

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)  # time: between two looks
            waiting, self._waiting = self._waiting, []
            if waiting and await self._now() != self._before:
                self._waiting += waiting
                continue
            for future in waiting:
                if not future.done():
                    future.set_result(None)


class Chaos:
    """Does what a scenario says to one `serve`. `log_folder` can be filled up: it is small, and on a disk of its own.
    `set_link` sets the link of the other host up or down."""

    def __init__(
        self,
        processes: ServedProcesses,
        client: OpenAiHttp,
        *,
        log_folder: Callable[[], Path] | None = None,
        set_link: Callable[[str], None] | None = None,
    ) -> None:
        self._processes = processes
        self._client = client
        self._log_folder = log_folder
        self._set_link = set_link
        self._random = random.Random(0)
        #: Actions that have lost a worker, and have not ended.
        self._num_losses = 0

    async def run(self, scenario: Scenario, load: MixedLoad, whole: WholeHost) -> None:
        """Do all of it, and wait until the host is whole again. What clients see meanwhile is checked by the load."""
        self._random = random.Random(scenario.seed)
        if HOARD in scenario.actions:
            await asyncio.to_thread(large_picture, "")  # takes a second, once
        start = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as tasks:
            for number, injection in enumerate(scenario.schedule()):
                left_s = start + injection.at_s - asyncio.get_running_loop().time()
                await asyncio.sleep(max(0.0, left_s))  # time: the schedule's
                if scenario.in_pairs and number % 2 == 0:
                    await whole.wait(f"before {injection}")
                load.log(f"{injection}")
                tasks.create_task(self._inject(injection, load, whole))

    async def _inject(self, injection: Injection, load: MixedLoad, whole: WholeHost) -> None:
        action = injection.action
        are_lost = action.loses_worker and self._num_losses > 0
        self._num_losses += action.loses_worker
        with load.allowing(action.seen | (WORKERS_LOST if are_lost else NOTHING)):
            await getattr(self, f"_{action.name}")(injection, load)
            if action.seen or action.loses_worker:
                await whole.wait(f"after {injection}")
        self._num_losses -= action.loses_worker

    async def _one(self, kind: str, number: int) -> list[int]:
        """One process of this kind; none if there is none now."""
        pids = [self._processes.serve.pid] if kind == "serve" else await self._processes.of(kind)
        return [pids[number % len(pids)]] if pids else []

    async def _kill(self, injection: Injection, load: MixedLoad) -> None:
        if pids := await self._one(injection.action.kind, injection.number):
            load.log(f"         kill -9 {pids[0]} ({command_of(pids[0])[:60]})")
            await self._processes.kill(pids)

    async def _stop(self, injection: Injection, _load: MixedLoad) -> None:
        with suspended(*await self._one(injection.action.kind, injection.number)):
            await asyncio.sleep(injection.seconds)  # time: how long it is stopped

    async def _cut(self, injection: Injection, load: MixedLoad) -> None:
        if injection.action.kind == "link":
            self._set_link("down")
            try:
                await asyncio.sleep(injection.seconds)  # time: how long the link is down
            finally:
                self._set_link("up")
            return
        client, server = injection.action.kind.split("-")
        is_one = injection.number % 3
        clients = await (self._one(client, injection.number // 7) if is_one else self._processes.of(client))
        for pid in await self._one(server, injection.number):
            load.log(f"         {cut(pid, clients)} connections")

    async def _overwrite(self, injection: Injection, load: MixedLoad) -> None:
        """What nobody holds: a process that reads it without a hold gets a wrong answer."""
        load.forget()
        for pid in await self._one("store", injection.number):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        load.forget()

    async def _poison(self, injection: Injection, load: MixedLoad) -> None:
        """One that is sent twice ends three preparers, and is refused."""
        height = sorted(BREAKS)[injection.number % len(BREAKS)]
        body = chat(picture(9000 + next(_POISONS), BREAKING_WIDTH, height), text("What?"))
        for _ in range(2):
            await load.expect(body, POISONED, f"poison {height}")

    async def _hoard(self, injection: Injection, load: MixedLoad) -> None:
        """Streams that hold pictures: more of them than the arena has room for."""
        with load.nothing_kept():
            parts = [large_picture(f"{injection.number} {n}") for n in range(_NUM_HOARDED)]
            tasks = [asyncio.create_task(load.hold_open(part)) for part in parts]
            await asyncio.sleep(injection.seconds)  # time: how long they are held
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _fill(self, injection: Injection, _load: MixedLoad) -> None:
        filler = self._log_folder() / "filler"
        try:
            with suppress(OSError), filler.open("wb", buffering=0) as file:  # until there is no space
                while file.write(_FULL):
                    pass
            await asyncio.sleep(injection.seconds)  # time: how long the disk is full
        finally:
            filler.unlink(missing_ok=True)

    async def _malformed(self, injection: Injection, _load: MixedLoad) -> None:
        """Some stay open for a while: what is half a message may be completed."""
        with suppress(OSError):
            sock = await self._connected(injection)
            with sock:
                sock.settimeout(1.0)
                sock.sendall(self._bytes(injection))
                await asyncio.sleep(injection.seconds)  # time: how long it stays open

    async def _connected(self, injection: Injection) -> socket.socket:
        """Raises OSError."""
        if injection.action.kind == "gateway":
            return socket.create_connection(("127.0.0.1", urlsplit(self._client.base_url).port), timeout=1.0)
        words = [command_of(pid).split() for pid in await self._one(injection.action.kind, injection.number)]
        if not words:
            raise ConnectionRefusedError
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(1.0)
        sock.connect(words[0][words[0].index("--listen") + 1].removeprefix("unix:"))
        return sock

    def _bytes(self, injection: Injection) -> bytes:
        noise = self._random.randbytes(200)
        if injection.action.kind == "gateway":
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            forms = [
                noise,
                head + b"Content-Length: 100000\r\n\r\n{",
                head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + noise,
                head + b"Content-Length: 3\r\n\r\n{}}" + noise,
                b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000,
                head,
            ]
        else:
            forms = [
                noise,
                _LENGTH.pack((1 << 32) - 1) + noise,
                _LENGTH.pack(1000) + noise,
                _LENGTH.pack(len(noise)) + noise,
                *(_LENGTH.pack(len(data)) + data for data in map(msgspec.msgpack.encode, ([1, 2], {"type": "Hello"}))),
                _LENGTH.pack(1) + b"\xc1",
                b"",
            ]
        return forms[injection.number % len(forms)]


def large_picture(name: str) -> dict[str, Any]:
    """Its content is new, by what follows the end of the image."""
    return image(data_url(photo(7000, 1400, 1050) + name.encode()))
