"""A gateway's real `WorkerPool`, links and `Router` over real sockets to many workers, which a second process plays:
each reports its load at a fixed rate, and answers a request at once with one token.

The workers cost that process little (their reports are encoded once), so that it keeps the rate on the other core.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

import msgspec
import uvloop
from prometheus_client import CollectorRegistry

from medialane.gateway import AppBackend, GatewayConfig, Transports, WorkerLink, WorkerPool, open_scope
from medialane.observability import Metrics
from medialane.routing import Router
from medialane.testing.fake_processor import FakeAssembler
from medialane.types.request import (
    CompletionDelta,
    EngineRequest,
    ExpandedPrompt,
    ModelCard,
    OutputDelta,
    WorkerLoad,
)
from medialane.wire import (
    FrameReader,
    Hello,
    LoadReport,
    Output,
    Ping,
    Pong,
    Released,
    RpcConfig,
    Submit,
    Welcome,
    append_frame,
    decode_to_worker,
)

#: Each has room for what all requests send to it between two reports: what is measured is the gateway's CPU.
CARD = ModelCard(
    model="none", max_model_len=8192, block_size=16, processor={"model": "none"}, max_num_batched_tokens=1 << 17
)
PROMPT_TOKENS = 512
_MAX_FRAME_BYTES = 1 << 20
_CONNECTED_S = 120.0
#: Worker reports are sent by as many timers as this, so that they are spread over the interval.
_NUM_TURNS = 20


def _frame(message: msgspec.Struct) -> bytes:
    buffer = bytearray()
    append_frame(buffer, message, _MAX_FRAME_BYTES)
    return bytes(buffer)


_REPORTS = [_frame(LoadReport((WorkerLoad(number % 7, 0, number % 3 / 10),))) for number in range(21)]


class _PlayedWorker(asyncio.Protocol):
    """One connection of the gateway to one worker."""

    def __init__(self, number: int, connected: list[_PlayedWorker]) -> None:
        self._number, self._connected = number, connected
        self._frames = FrameReader(_MAX_FRAME_BYTES)
        self._numbers = count(number)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, _error: Exception | None) -> None:
        if self in self._connected:
            self._connected.remove(self)

    def data_received(self, data: bytes) -> None:
        self._frames.receive(data)
        while (frame := self._frames.next_frame()) is not None:
            match decode_to_worker(frame):
                case Hello():
                    self._transport.write(_frame(Welcome(f"played-{self._number}", 1, CARD)))
                    self._connected.append(self)
                case Ping(number):
                    self._transport.write(_frame(Pong(number)))
                case Submit(request):
                    self._answer(request.request_id)

    def report(self) -> None:
        self._transport.write(_REPORTS[next(self._numbers) % len(_REPORTS)])

    def _answer(self, request_id: str) -> None:
        first = CompletionDelta(0, "", [7], finish_reason="length")
        delta = OutputDelta(request_id, [first], finished=True, num_cached_tokens=0)
        self._transport.write(_frame(Output(delta)) + _frame(Released(request_id)))


def play(path: str, per_s: float, sent: Any) -> None:
    """Serve each connection to the socket as a worker that reports `per_s` times a second; `sent` counts reports."""
    uvloop.run(_play(path, per_s, sent))


async def _play(path: str, per_s: float, sent: Any) -> None:
    connected: list[_PlayedWorker] = []
    numbers = count()
    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(lambda: _PlayedWorker(next(numbers), connected), path, backlog=4096)
    async with server:
        due = loop.time()
        for turn in count():
            for worker in connected[turn % _NUM_TURNS :: _NUM_TURNS]:
                worker.report()
                sent.value += 1
            due += 1 / per_s / _NUM_TURNS
            await asyncio.sleep(max(0.0, due - loop.time()))


@dataclass
class Measured:
    """CPU seconds of the gateway's process per second, and what reached it in that second."""

    cores: float
    reports_per_s: float
    requests_per_s: float


def measure(path: str, num_workers: int, *, reports: float, requests: float, seconds: float) -> Measured:
    """Return the cost of `reports` a second of each worker, and `requests` a second; `path` is of a socket to make."""
    context = multiprocessing.get_context("spawn")
    sent = context.Value("Q", lock=False)
    workers = context.Process(target=play, args=(path, reports, sent), daemon=True)
    workers.start()
    try:
        return uvloop.run(_gateway(path, num_workers, sent, requests=requests, seconds=seconds))
    finally:
        workers.kill()
        workers.join()


async def _gateway(path: str, num_workers: int, sent: Any, *, requests: float, seconds: float) -> Measured:
    metrics = Metrics(CollectorRegistry())
    hello, config, rpc = Hello(gateway_id="bench", processor=CARD.processor), GatewayConfig(), RpcConfig()
    address = f"unix://{path}"
    pool = WorkerPool(
        [
            WorkerLink(f"w{number}", hello, address=address, rpc=rpc, config=config, metrics=metrics)
            for number in range(num_workers)
        ]
    )
    nothing: Any = None
    gateway = AppBackend(
        config=config,
        transports=Transports([]),
        store_items=nothing,
        assembler=FakeAssembler(),
        workers=pool,
        router=Router(),
        metrics=metrics,
    )
    running = asyncio.create_task(pool.run())
    try:
        async with asyncio.timeout(_CONNECTED_S):
            while pool.num_ready < num_workers:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.05)
        cpu, reported, started = time.process_time(), sent.value, time.perf_counter()
        num_requests = await _send(gateway, requests, seconds)
        took_s = time.perf_counter() - started
        cpu_s, num_reports = time.process_time() - cpu, sent.value - reported
        return Measured(cpu_s / took_s, num_reports / took_s, num_requests / took_s)
    finally:
        running.cancel()
        await asyncio.wait([running])
        gateway.close()
        metrics.close()


async def _send(gateway: AppBackend, per_s: float, seconds: float) -> int:
    """Send requests for this time, and return the number of answers. Raises what a request raises."""
    loop = asyncio.get_running_loop()
    started, number = loop.time(), 0
    async with asyncio.TaskGroup() as group:
        while (now := loop.time() - started) < seconds:
            while number < now * per_s:
                number += 1
                group.create_task(_request(gateway, number))
            await asyncio.sleep(0.002 if per_s else seconds)
    return number


async def _request(gateway: AppBackend, number: int) -> None:
    prompt = ExpandedPrompt([number, *range(PROMPT_TOKENS - 1)])
    request = EngineRequest(f"r{number}", prompt, b"\x80")
    with open_scope():
        async with aclosing(gateway.generate(request, None)) as deltas:
            async for _ in deltas:
                pass
