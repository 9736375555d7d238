"""A whole gateway in a separate process (vLLM's app, intake), its media store in a child process of that, with the
preparers, and a fake worker.

The worker runs in the benchmark's own process. To observe the gateway from inside, a benchmark passes a function of its
module, `alongside`, which runs on the gateway's event loop until the gateway stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Self

import aiohttp
import msgspec
import uvloop

from local_store import store_link
from medialane.cli import gateway, gateway_command, store
from medialane.cli.serving import tune_process
from medialane.cli.settings import Reloading
from medialane.config import Config, enter_environ
from medialane.observability import logging
from medialane.runtime.linux import signal_on_parent_death
from medialane.store import StoreEntries, StoreLink
from medialane.testing.fake_worker import FAKE_CARD, FakeHandler
from medialane.types.request import EngineRequest, OutputDelta
from medialane.types.tensor import TensorDescriptor
from medialane.wire import Hello, RpcConfig, Welcome, bind_http
from medialane.worker import RpcServer

#: vLLM is imported twice and processors are loaded: takes minutes on shared cores.
START_S = 300.0

#: Appends its observations to the list passed to it.
Alongside = Callable[[list[Any]], Coroutine[Any, Any, None]]


class Peers(NamedTuple):
    """Addresses of the gateway's workers and of its store."""

    workers: tuple[str, ...]
    store: str

    @classmethod
    def in_folder(cls, folder: str, *, num_workers: int = 1) -> Self:
        return cls(tuple(f"unix://{folder}/worker{n}" for n in range(num_workers)), f"unix://{folder}/store")


class AgreeingWorker(FakeHandler):
    """Accepts any gateway: reports the gateway's processor settings as its own, and that it maps the store's arena.
    Like a real worker it holds what a request refers to, but reads nothing."""

    def __init__(self, link: StoreLink, *, delay_s: float, worker_id: str = "fake-worker") -> None:
        super().__init__(worker_id=worker_id, card=FAKE_CARD, delay_s=delay_s)
        self._entries = StoreEntries(link)
        link.watch(lambda offer: self.map_arena(None if offer is None else offer.id))

    async def register(self, hello: Hello) -> Welcome:
        welcome = await super().register(hello)
        card = msgspec.structs.replace(welcome.card, processor=hello.processor)
        return msgspec.structs.replace(welcome, card=card)

    async def run(self, request: EngineRequest) -> AsyncGenerator[OutputDelta, None]:
        ranges = {t.range for item in request.prompt.media for t in item.tensors if isinstance(t, TensorDescriptor)}
        hold = await self._entries.hold(list(ranges)) if ranges else None
        deltas = self.outputs(request)
        try:
            async for delta in deltas:
                yield delta
        finally:
            await deltas.aclose()
            if hold is not None:
                hold.release()
            self.requests.clear()  # benchmarks send many

    def outputs(self, request: EngineRequest) -> AsyncGenerator[OutputDelta, None]:
        return super().run(request)


@contextlib.asynccontextmanager
async def worker(peers: Peers, config: Config, *, delay_s: float = 0.0) -> AsyncIterator[AgreeingWorker]:
    """Run the only fake worker; each of its tokens takes `delay_s`."""
    async with store_link(peers.store, directory=config.arena.directory) as link:
        handler = AgreeingWorker(link, delay_s=delay_s)
        async with serving(handler, peers.workers[0]):
            yield handler


@contextlib.asynccontextmanager
async def serving(handler: AgreeingWorker, address: str) -> AsyncIterator[None]:
    server = RpcServer(handler, RpcConfig())
    await server.serve(address)
    try:
        yield
    finally:
        await server.close()


@dataclass(frozen=True)
class GatewayProcess:
    """A started gateway, possibly not ready yet. Its store and its preparers are descendants of process `pid`."""

    pid: int
    url: str
    #: Stops it and returns the observations of `alongside`.
    end: Callable[[], list[Any]]


@contextlib.contextmanager
def gateway_process(
    model: str, peers: Peers, *, config: Config, flags: Sequence[str], alongside: Alongside | None = None
) -> Iterator[GatewayProcess]:
    """Start the gateway; it is killed on exit unless it was stopped before."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    given = {"pipe": theirs, "config": config, "flags": flags, "alongside": alongside}
    process = context.Process(target=run_gateway, args=(model, peers), kwargs=given)
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
    model: str, peers: Peers, *, pipe: Connection, config: Config, flags: Sequence[str], alongside: Alongside | None
) -> None:
    """Main function of the gateway process, like `medialane gateway`."""
    storing = multiprocessing.get_context("spawn").Process(target=run_store, args=(config, model, flags, peers.store))
    storing.start()
    enter_environ(config, "gateway", model, flags, on_gpu=False, own=gateway_command._OWN)
    tune_process()
    if config.logging.access:
        logging.configure(config.logging, open(os.devnull, "w"), component="gateway")  # noqa: SIM115 - until the end
    try:
        with bind_http("127.0.0.1", 0) as sock:
            pipe.send(sock.getsockname()[1])
            noted = uvloop.run(_serve(config, model, peers=peers, sock=sock, flags=flags, alongside=alongside))
    finally:
        storing.terminate()
        storing.join()
    pipe.send(noted)


def run_store(config: Config, model: str, flags: Sequence[str], address: str) -> None:
    """Main function of the store process, like `medialane store`. Stops with the gateway, however that ends."""
    signal_on_parent_death(signal.SIGTERM, parent_pid=os.getppid())
    enter_environ(config, "store", model, flags, on_gpu=False)
    store.run_store(Reloading(config), model, flags, address)


async def _serve(
    config: Config,
    model: str,
    *,
    peers: Peers,
    sock: socket.socket,
    flags: Sequence[str],
    alongside: Alongside | None,
) -> list[Any]:
    noted: list[Any] = []
    watching = asyncio.create_task(alongside(noted)) if alongside is not None else None
    addresses = gateway.GatewayAddresses(list(peers.workers), peers.store)
    await gateway.serve(Reloading(config), model, flags, addresses=addresses, sock=sock)
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
