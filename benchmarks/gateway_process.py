"""A whole gateway in a separate process (vLLM's app, intake, arena, preparers), and a fake worker.

The worker runs in the benchmark's own process. To observe the gateway from inside, a benchmark passes a function of its
module, `alongside`, which runs on the gateway's event loop until the gateway stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import aiohttp
import msgspec
import uvloop

from medialane.cli import gateway, gateway_command
from medialane.cli.tuning import tune_process
from medialane.config import Config, enter_environ
from medialane.core.request import EngineRequest, OutputDelta
from medialane.rpc import FakeHandler, Hello, RpcConfig, RpcServer, Welcome
from medialane.rpc.fake import FAKE_CARD

#: vLLM is imported twice and processors are loaded: takes minutes on shared cores.
START_S = 300.0

#: Appends its observations to the list passed to it.
Alongside = Callable[[list[Any]], Coroutine[Any, Any, None]]


class AgreeingWorker(FakeHandler):
    """Accepts any gateway: reports the gateway's processor settings as its own, and that it maps the arena."""

    async def register(self, hello: Hello) -> Welcome:
        welcome = await super().register(hello)
        card = msgspec.structs.replace(welcome.card, processor=hello.processor)
        return msgspec.structs.replace(welcome, card=card)

    async def run(self, request: EngineRequest) -> AsyncGenerator[OutputDelta, None]:
        deltas = super().run(request)
        try:
            async for delta in deltas:
                yield delta
        finally:
            await deltas.aclose()
            self.requests.clear()  # benchmarks send many


@contextlib.asynccontextmanager
async def worker(address: str, *, delay_s: float = 0.0) -> AsyncIterator[AgreeingWorker]:
    """Run a fake worker that listens at `address`; each of its tokens takes `delay_s`."""
    handler = AgreeingWorker(card=FAKE_CARD, shm=True, delay_s=delay_s)
    server = RpcServer(handler, RpcConfig())
    await server.serve(address)
    try:
        yield handler
    finally:
        await server.close()


@dataclass(frozen=True)
class GatewayProcess:
    """A started gateway, possibly not ready yet."""

    pid: int
    url: str
    #: Stops it and returns the observations of `alongside`.
    end: Callable[[], list[Any]]


@contextlib.contextmanager
def gateway_process(
    model: str, worker: str, *, config: Config, flags: Sequence[str], alongside: Alongside | None = None
) -> Iterator[GatewayProcess]:
    """Start the gateway; it is killed on exit unless it was stopped before."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    given = {"pipe": theirs, "config": config, "flags": flags, "alongside": alongside}
    process = context.Process(target=run_gateway, args=(model, worker), kwargs=given)
    process.start()

    def end() -> list[Any]:
        process.terminate()
        noted: list[Any] = ours.recv()
        process.join()
        return noted

    try:
        if not ours.poll(START_S):
            raise RuntimeError(f"the gateway's process has sent nothing for {START_S:g} s")
        assert process.pid is not None
        yield GatewayProcess(process.pid, f"http://127.0.0.1:{ours.recv()}", end)
    finally:
        if process.is_alive():
            process.kill()
            process.join()


def run_gateway(
    model: str, worker: str, *, pipe: Connection, config: Config, flags: Sequence[str], alongside: Alongside | None
) -> None:
    """Main function of the gateway process, like `medialane gateway`."""
    enter_environ(config, model, flags, on_gpu=False, own=gateway_command._OWN)
    tune_process()
    with gateway.bind("127.0.0.1", 0) as sock:
        pipe.send(sock.getsockname()[1])
        pipe.send(uvloop.run(_serve(config, model, worker=worker, sock=sock, flags=flags, alongside=alongside)))


async def _serve(
    config: Config,
    model: str,
    *,
    worker: str,
    sock: socket.socket,
    flags: Sequence[str],
    alongside: Alongside | None,
) -> list[Any]:
    noted: list[Any] = []
    watching = asyncio.create_task(alongside(noted)) if alongside is not None else None
    await gateway.serve(config, model, flags, workers=[worker], sock=sock)
    if watching is not None:
        watching.cancel()
    return noted


async def until_ready(session: aiohttp.ClientSession, url: str) -> None:
    """Wait for the gateway. Raises TimeoutError if it does not become ready."""
    async with asyncio.timeout(START_S):
        while True:
            with contextlib.suppress(aiohttp.ClientConnectionError):
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.1)
