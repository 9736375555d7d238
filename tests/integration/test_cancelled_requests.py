"""A client that disconnects frees what its request has reached, within 100 ms of the loop's time, a preparer within
250 ms; although the app does not listen for it. Real sockets, store and preparers; a fake engine.

The time is that of a loop that runs: what a busy machine takes away between two of its iterations counts as 10 ms.
"""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
import uvicorn
from gateway_parts import MEDIA, FakeWorker, Parts, png, request
from host_store import fetching
from prometheus_client import CollectorRegistry

from http_origin import HttpOrigin
from intakes import Intake
from medialane.gateway import (
    BoundedServer,
    GatewayConfig,
    ScopeMiddleware,
    current_scope,
    http_bounds,
)
from medialane.media import MediaConfig
from medialane.observability import Metrics
from medialane.testing.fake_processor import PLACEHOLDER_TOKEN
from medialane.types.feature import MediaPrompt
from waiting import eventually

#: Longest share of one iteration that counts.
TICK_S = 0.01
FREED_S, PREPARER_FREED_S = 0.1, 0.25
#: How often it is tried: the time is the least, as other processes of this machine run meanwhile.
NUM_TRIES = 3


class LoopTime:
    """Seconds for which the loop was running."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.seconds, self._last = 0.0, self._loop.time()
        self._next = self._loop.call_later(TICK_S / 2, self._tick)

    def _tick(self) -> None:
        now = self._loop.time()
        self.seconds += min(now - self._last, TICK_S)
        self._last = now
        self._next = self._loop.call_later(TICK_S / 2, self._tick)

    def stop(self) -> float:
        self._next.cancel()
        return self.seconds


class Ask(msgspec.Struct):
    """What a client sends: `num_prompts` prompts, each with all images, whose processing takes `sleep_s`."""

    images: list[str] = []
    sleep_s: float = 0.0
    max_tokens: int = 4
    token_s: float = 0.0
    num_prompts: int = 1


class Served:
    """The gateway of `parts` behind our middleware and HTTP server, with an app that never listens for disconnects."""

    def __init__(self, parts: Parts, preparers, worker: FakeWorker, arena, origin: HttpOrigin) -> None:
        self.parts, self.preparers, self.worker, self.arena, self.origin = parts, preparers, worker, arena, origin
        self.num_running = self.num_tokens = 0
        self.port = 0

    async def counted(self, scope, receive, send) -> None:
        self.num_running += 1
        try:
            await self._middleware(scope, receive, send)
        finally:
            self.num_running -= 1

    async def app(self, _scope, receive, send) -> None:
        body = json.loads((await receive())["body"])
        images = [part["image_url"]["url"] for part in body["messages"][0]["content"]]
        ask = msgspec.convert(body["ask"], Ask)
        await asyncio.gather(*[self._answer(ask, images, number) for number in range(ask.num_prompts)])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    async def _answer(self, ask: Ask, images: list[str], number: int) -> None:
        gateway, items = self.parts.gateway, tuple(map(current_scope().resolve, images))
        token_ids = [1] + [token for _ in items for token in (2, PLACEHOLDER_TOKEN)]
        options = msgspec.json.encode({"sleep_s": ask.sleep_s}) if ask.sleep_s else b"{}"
        prepared = await gateway.prepare(MediaPrompt(token_ids, items, options)) if items else None
        ids = prepared.token_ids if prepared is not None else token_ids
        wanted = request(f"r{number}", ids, max_tokens=ask.max_tokens, token_s=ask.token_s)
        async for _ in gateway.generate(wanted, prepared):
            self.num_tokens += 1

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        config, metrics = GatewayConfig(), Metrics(CollectorRegistry())
        intake = Intake(self.app, config, MEDIA)
        self._middleware = ScopeMiddleware(intake, metrics)
        settings = uvicorn.Config(self.counted, interface="asgi3", lifespan="off", log_config=None)
        server = BoundedServer(settings, bounds=http_bounds(config))
        with socket.create_server(("127.0.0.1", 0)) as sock:
            self.port = sock.getsockname()[1]
            task = asyncio.create_task(server.serve(sockets=[sock]))
            try:
                yield
            finally:
                server.should_exit = True
                await task
                metrics.close()
                intake.close()

    async def connect(self, ask: Ask, *, sent_bytes: int | None = None) -> asyncio.StreamWriter:
        """Send a request, or only so much of its body."""
        content = [{"type": "image_url", "image_url": {"url": url}} for url in ask.images]
        document = {"messages": [{"role": "user", "content": content}], "ask": msgspec.to_builtins(ask)}
        body = json.dumps(document).encode()
        lines = ["POST /v1/x HTTP/1.1", "host: a", "content-type: application/json", f"content-length: {len(body)}"]
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write("\r\n".join([*lines, "", ""]).encode() + body[:sent_bytes])
        return writer

    async def time_to_free(self, writer: asyncio.StreamWriter, is_freed: Callable[[], bool]) -> float:
        """Disconnect; return the loop's time until it is freed, and wait until the request has ended."""
        assert not is_freed()
        time = LoopTime()
        writer.transport.abort()
        try:
            await eventually(is_freed, "it is freed", more=lambda: (self.arena.stats(), self.preparers.stats()))
        finally:
            seconds = time.stop()
        await eventually(lambda: not self.num_running, "the request has ended")
        await eventually(lambda: not self.parts.num_held and not self.worker.engine.num_reading, "nothing is held")
        return seconds


@pytest.fixture
async def served(arena, preparers):
    async with HttpOrigin() as origin:
        media = MediaConfig(allowed_media_networks=("127.0.0.0/8",))
        with tempfile.TemporaryDirectory(dir="/tmp") as folder:
            worker = FakeWorker(f"{folder}/w.sock", arena=arena)
            await worker.start()
            async with (
                fetching(arena, media) as fetcher,
                Parts(arena, preparers, [worker], fetcher=fetcher) as parts,
            ):
                served = Served(parts, preparers, worker, arena, origin)
                async with served.serving():
                    yield served
            await worker.close()


def data_url(number: int) -> str:
    return "data:image/png;base64," + base64.b64encode(png(60, 40, number)).decode()


async def body(served: Served, number: int) -> float:
    writer = await served.connect(Ask([data_url(number)]), sent_bytes=100)
    await eventually(lambda: served.num_running, "its body is read")
    return await served.time_to_free(writer, lambda: not served.num_running)


async def fetch(served: Served, number: int) -> float:
    async def hang(_request, writer) -> None:
        writer.write(b"HTTP/1.1 200 X\r\ncontent-type: image/png\r\ncontent-length: 100000\r\n\r\nfirst bytes")
        await asyncio.Event().wait()

    path = f"/{number}.png"
    served.origin.routes[path] = hang
    writer = await served.connect(Ask([served.origin.url(path)]))
    await eventually(lambda: served.arena.stats().num_reservations, "its media are fetched")
    return await served.time_to_free(writer, lambda: not served.arena.stats().num_reservations)


async def queue(served: Served, number: int) -> float:
    busy = [await served.connect(Ask([data_url(2 * number + i)], sleep_s=30)) for i in range(2)]
    await eventually(lambda: served.preparers.stats().num_busy == 2, "all preparers are busy")
    writer = await served.connect(Ask([data_url(100 + number)]))
    await eventually(lambda: served.preparers.stats().num_queued, "it waits for a preparer")
    time = LoopTime()
    writer.transport.abort()
    await eventually(lambda: not served.preparers.stats().num_queued, "it has left the queue")
    seconds = time.stop()
    for other in busy:
        other.transport.abort()
    await eventually(lambda: not served.num_running, "the requests have ended")
    await eventually(lambda: not served.parts.num_held, "nothing is held")
    return seconds


async def preparer(served: Served, number: int) -> float:
    writer = await served.connect(Ask([data_url(number)], sleep_s=30))
    await eventually(lambda: served.preparers.stats().num_busy, "it is processed")
    return await served.time_to_free(writer, lambda: not served.preparers.stats().num_busy)


async def engine(served: Served, number: int) -> float:
    writer = await served.connect(Ask([data_url(number)], token_s=60))
    await eventually(lambda: served.worker.engine.num_reading, "the engine has it")
    return await served.time_to_free(writer, lambda: not served.worker.engine.num_reading)


async def stream(served: Served, number: int) -> float:
    served.num_tokens = 0
    writer = await served.connect(Ask([data_url(number)], token_s=0.001, max_tokens=100_000))
    await eventually(lambda: served.num_tokens, "it has tokens")
    return await served.time_to_free(writer, lambda: not served.worker.engine.num_reading)


async def several_prompts(served: Served, number: int) -> float:
    writer = await served.connect(Ask([data_url(number)], token_s=60, num_prompts=3))
    await eventually(lambda: served.worker.engine.num_reading == 3, "the engine has all of them")
    return await served.time_to_free(writer, lambda: not served.worker.engine.num_reading)


async def text(served: Served, number: int) -> float:
    writer = await served.connect(Ask(token_s=60))
    await eventually(lambda: served.worker.engine.num_reading, "the engine has it")
    return await served.time_to_free(writer, lambda: not served.worker.engine.num_reading)


STEPS = {
    body: FREED_S,
    fetch: FREED_S,
    queue: FREED_S,
    preparer: PREPARER_FREED_S,
    engine: FREED_S,
    stream: FREED_S,
    several_prompts: FREED_S,
    text: FREED_S,
}


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
async def test_disconnected_client_frees_the_step_that_its_request_has_reached(served, step):
    seconds = [await step(served, number) for number in range(NUM_TRIES)]
    assert min(seconds) < STEPS[step], seconds
