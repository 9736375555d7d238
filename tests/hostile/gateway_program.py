"""The gateway that the corpus attacks, in its own process: all of `medialane gateway` with a fake worker; and, in a
child process, all of `medialane store`, which is forked once vLLM is imported and the processor built.

The store differs from the product in two places. Names of `.test` resolve by the table here, which allows DNS
rebinding; resolved addresses are validated as usual. And the preparers' processor is `breaking_processor`, which
crashes on images of certain sizes and is vLLM's for all others.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from aiohttp import ThreadedResolver
from aiohttp.abc import AbstractResolver, ResolveResult

from medialane.config import Config, enter_environ
from medialane.media.fetch import Fetcher
from medialane.prepare import fork_forkserver
from medialane.runtime.linux import exit_at_once, signal_on_parent_death
from medialane.store import StoreLink
from medialane.testing.fake_worker import FAKE_CARD, FakeHandler
from medialane.wire import Hello, RpcConfig, Welcome, bind_http
from medialane.worker import RpcServer

#: Successive results of look-ups of a name; the last one repeats.
NAMES: dict[str, list[list[str]]] = {
    "good.test": [["127.0.0.2"]],
    "inside.test": [["127.0.0.1"]],
    "inside6.test": [["::1"]],
    "mapped.test": [["::ffff:127.0.0.1"]],
    "mixed.test": [["127.0.0.2", "127.0.0.1"]],
    "rebinding.test": [["127.0.0.2"], ["127.0.0.1"]],
    "metadata.google.internal": [["169.254.169.254"]],
    "localhost": [["127.0.0.1", "::1"]],
    "localhost.": [["127.0.0.1"]],
}


class LyingNames(AbstractResolver):
    """The names of the table, and the system's resolver for addresses in any notation."""

    def __init__(self) -> None:
        self._answers = {
            name: itertools.chain(answers, itertools.repeat(answers[-1])) for name, answers in NAMES.items()
        }
        self._system = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        host = host.lower()
        if host.endswith((".test", ".invalid")) and host not in NAMES:
            raise OSError("no such name")
        if host not in NAMES:
            return await self._system.resolve(host, port, family)
        return [_result(host, address, port) for address in next(self._answers[host])]

    async def close(self) -> None:
        await self._system.close()


def _result(host: str, address: str, port: int) -> ResolveResult:
    kind = socket.AF_INET6 if ":" in address else socket.AF_INET
    return ResolveResult(hostname=host, host=address, port=port, family=kind, proto=0, flags=socket.AI_NUMERICHOST)


class AgreeingWorker(FakeHandler):
    """Accepts features of any gateway: claims equal processor settings, and to have mapped the store's arena."""

    async def register(self, hello: Hello) -> Welcome:
        welcome = await super().register(hello)
        card = msgspec.structs.replace(welcome.card, processor=hello.processor)
        return msgspec.structs.replace(welcome, card=card)


def main(model: str, port: int, folder: Path, flags: Sequence[str]) -> None:
    """Serve on `port` with the settings of `folder`/config.json until SIGTERM."""
    config = msgspec.json.decode((folder / "config.json").read_bytes(), type=Config)
    # vllm reads its environment when it is imported.
    enter_environ(config, None, model, flags, on_gpu=False, own={"VLLM_MEDIA_CONNECTOR": "medialane"})
    from medialane.cli import gateway, store  # noqa: F401 - vLLM, once for both processes

    store.PROCESSOR_FACTORY = "breaking_processor:build_processor"
    store.Fetcher = _fetcher
    store.prebuild(config, model, flags, os.environ)
    with _forked(lambda: store.run_store(reloading(config), model, flags, f"unix:{folder}/store")):
        uvloop.run(serve(config, model, folder, port=port, flags=[*flags, "--disable-uvicorn-access-log"]))


def reloading(config: Config) -> Any:
    """The settings as commands take them. Nothing reloads them."""
    from medialane.cli.settings import Reloading

    return Reloading(config)


def _fetcher(*args: Any, **kwargs: Any) -> Fetcher:
    return Fetcher(*args, **kwargs, resolver=LyingNames())  # which needs a running loop


@contextmanager
def _forked(run_store: Callable[[], int]) -> Iterator[None]:
    """In a fork, run the store with a fork server that has the processor."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            if signal_on_parent_death(signal.SIGTERM, parent_pid=parent):
                fork_forkserver()
                status = run_store()
        finally:
            exit_at_once(status)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)


async def serve(config: Config, model: str, folder: Path, *, port: int, flags: Sequence[str]) -> None:
    from medialane.cli import gateway

    worker, store = f"unix:{folder}/worker", f"unix:{folder}/store"
    handler = AgreeingWorker(card=FAKE_CARD)
    server = RpcServer(handler, RpcConfig())
    await server.serve(worker)
    try:
        async with mapping(handler, config, store):
            with bind_http("127.0.0.1", port) as sock:
                addresses = gateway.GatewayAddresses([worker], store)
                await gateway.serve(reloading(config), model, flags, addresses=addresses, sock=sock)
    finally:
        await server.close()


@asynccontextmanager
async def mapping(handler: AgreeingWorker, config: Config, store: str) -> AsyncIterator[None]:
    """Have the worker claim to have mapped the arena of whatever store is connected."""
    link = StoreLink(store, rpc=config.rpc, arena_directory=config.arena.directory, wait_timeout_s=1.0)
    link.watch(lambda offer: handler.map_arena(None if offer is None else offer.id))
    running = asyncio.create_task(link.run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.wait([running])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
