"""Runs a worker process: listen for gateways or join them (`Membership`), watch the engine, shut down.

On a signal, or when an operator asks for it, the worker drains: gateways are informed, new requests are refused, and
running requests have some time to end. Then they are failed, whereupon the gateways continue them elsewhere, and
cancelled, and the engine releases them; then the engine's processes are terminated. If the engine is lost, it cannot
release anything, so its processes are terminated first. What the requests hold at the store ends with them, or with
this process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

from medialane.runtime.phase import enter_phase, show_ready, show_stopping, watched
from medialane.runtime.resources import MemoryUse, group_below
from medialane.runtime.stop import DRAIN_TIMEOUT_S, Stop, stopped_by_signals
from medialane.runtime.tasks import Backoff, first_of
from medialane.types.errors import (
    AlreadyJoined,
    AuthenticationFailed,
    MedialaneError,
    NoWorkerReady,
    ProtocolViolation,
    WorkerLost,
)
from medialane.types.stats import ProcessKind
from medialane.wire.address import TcpAddress, format_tcp
from medialane.wire.config import RpcConfig
from medialane.wire.protocol import Hello, Join
from medialane.worker.config import WorkerConfig
from medialane.worker.engine import Engine
from medialane.worker.link import RpcServer
from medialane.worker.media import HostArena
from medialane.worker.metrics_server import WorkerStatus, metrics_served
from medialane.worker.worker import Worker

logger = logging.getLogger(__name__)

#: Exit status of a worker whose engine is lost: EX_SOFTWARE of sysexits.h. The worker should be restarted.
EXIT_ENGINE_LOST = 70

RESOLVE_TIMEOUT_S = 10.0


async def serve_worker(
    config: WorkerConfig,
    rpc: RpcConfig,
    engine: Engine,
    address: str | None,
    *,
    arena_directory: str,
    host_arena: HostArena | None = None,
    gateways: Sequence[TcpAddress] = (),
    drain_timeout_s: float = DRAIN_TIMEOUT_S,
) -> int:
    """Serve `engine` at `address`, if given, and to `gateways`, which it joins, until it has drained (0), or the engine
    is lost (EXIT_ENGINE_LOST).

    Owns the engine, which is closed in any case. Raises StartupFailed if it cannot listen at the address.
    """
    kind: ProcessKind = "encoder" if engine.card.role == "encoder" else "worker"
    memory = MemoryUse(lambda: {kind: [os.getpid()], "engine": group_below()})
    worker = Worker(engine, config, arena_directory=arena_directory, host_arena=host_arena, memory=memory.read)
    with stopped_by_signals() as stop:
        return await serve_until(
            stop, worker, engine, address, config=config, rpc=rpc, gateways=gateways, drain_timeout_s=drain_timeout_s
        )


async def serve_until(
    stop: Stop,
    worker: Worker,
    engine: Engine,
    address: str | None,
    *,
    config: WorkerConfig,
    rpc: RpcConfig,
    gateways: Sequence[TcpAddress] = (),
    drain_timeout_s: float = DRAIN_TIMEOUT_S,
) -> int:
    """Serve one worker until it has drained, after `stop` or a gateway's Drain (0), or its engine is lost
    (EXIT_ENGINE_LOST), like `serve_worker`. Closes worker and engine."""
    server = RpcServer(worker, rpc)
    status = WorkerStatus(worker, engine, server)
    num_ranks = max(1, worker.card.data_parallel_size)
    lost = False
    try:
        async with metrics_served(status, config, num_ranks=num_ranks, registry=worker.registry):
            with suppress(WorkerLost):  # reported by `watch`
                await worker.map_arena()  # before gateways connect
            if gateways:
                enter_phase("joining gateways")
            if address is not None:
                listening = await server.serve(address)
                logger.info("worker %s listens at %s", worker.worker_id, listening)
            membership = _membership(worker, server, gateways, config)
            draining = _drained(stop, worker, server, drain_timeout_s)
            show_ready("serving")
            async with watched(lambda: f"{server.num_gateways} gateways, {server.num_in_flight} requests"):
                lost = await _is_lost(worker, draining, membership)
    finally:
        if lost:
            await _close(engine, config.stop_timeout_s)
        await server.stop(WorkerLost("the worker has lost its engine") if lost else None)
        await _close(engine, config.stop_timeout_s)
        await server.close()
        worker.close()
    return EXIT_ENGINE_LOST if lost else 0


def default_name(config: WorkerConfig) -> str:
    """Return a name that other workers of this cluster do not have. With a metrics port, or in a container, a restarted
    worker has it again."""
    return f"{socket.gethostname()}:{config.metrics_port or os.getpid()}"


def _membership(worker: Worker, server: RpcServer, gateways: Sequence[TcpAddress], config: WorkerConfig) -> Membership:
    name = config.name or default_name(config)
    join = Join(name=name, worker_id=worker.worker_id, card=worker.card)
    if gateways:
        logger.info("worker %s joins gateways as %s", worker.worker_id, name)
    return Membership(gateways, partial(server.join, join=join), config=config)


async def _drained(stop: Stop, worker: Worker, server: RpcServer, timeout_s: float) -> None:
    """Wait until the worker is to stop, and has drained, or is not to wait any longer."""
    await first_of(stop.asked.wait(), worker.draining.wait())
    show_stopping()
    worker.drain()
    await first_of(server.drain(), stop.at_once.wait(), asyncio.sleep(timeout_s))
    if num_left := server.num_in_flight:
        logger.warning("%d requests have not ended while draining: gateways continue them elsewhere", num_left)


async def _is_lost(worker: Worker, draining: Coroutine[Any, Any, None], membership: Membership) -> bool:
    """Stay connected, and wait until the worker has drained (return False) or the engine is lost (return True)."""
    try:
        await first_of(worker.watch(), draining, membership.run())
    except WorkerLost as error:
        logger.critical("%s: exiting", error)
        return True
    return False


async def _close(engine: Engine, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await engine.close()
    except TimeoutError:
        logger.error("the engine did not stop within %g s", timeout_s)


class Delays(NamedTuple):
    """`initial_s` to `max_s`: before connecting to an address again. Names are resolved at most every
    `min_resolve_interval_s`, however many connections are lost. After a loss, connecting again waits `resolve_wait_s`
    for the name to be resolved: not for a resolver that does not respond."""

    initial_s: float = 0.2
    max_s: float = 2.0
    min_resolve_interval_s: float = 0.5
    resolve_wait_s: float = 1.0


class Connect(Protocol):
    def __call__(self, address: str, *, on_hello: Callable[[Hello], None]) -> Awaitable[None]:
        """Connect to a gateway, and return when the connection is lost. Raises like `RpcServer.join`."""
        ...


Resolve = Callable[[str], Awaitable[Sequence[str]]]


async def resolve(host: str) -> Sequence[str]:
    """Return all addresses of a host. Raises OSError."""
    resolved = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in resolved))


class Membership:
    """`run` keeps the worker connected to the gateways that it was given (`--join`). One event loop.

    Each name is resolved regularly, and after every loss; the worker connects to every address, and to the other
    gateways of that address's host, whose ports a gateway reports. One task per address connects, serves the connection
    until it ends, and tries again with exponential backoff, until the name no longer resolves to the address. A
    connection is never ended because of the DNS: while it lasts, the gateway is there. If a name cannot be resolved,
    its last addresses count.
    """

    def __init__(
        self,
        gateways: Sequence[TcpAddress],
        connect: Connect,
        *,
        config: WorkerConfig,
        resolve: Resolve = resolve,
        delays: Delays = Delays(),  # noqa: B008 - a constant
    ) -> None:
        self._delays = delays
        self._gateways = gateways
        self._connect = connect
        self._config = config
        self._resolve = resolve
        #: By gateway, its addresses (the host is an IP address); by address, the other gateways of that host.
        self._resolved: dict[TcpAddress, list[TcpAddress]] = {}
        self._siblings: dict[TcpAddress, list[TcpAddress]] = {}
        self._staying: set[TcpAddress] = set()
        self._changed = asyncio.Event()
        self._waiting: list[asyncio.Future[None]] = []  # for the next look-up

    async def run(self) -> None:
        """Stay connected until cancelled; connections are left open then."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._changed.clear()
                waiting, self._waiting = self._waiting, []
                await asyncio.gather(*(self._look_up(gateway) for gateway in self._gateways))
                for waiter in waiting:
                    waiter.set_result(None)
                for target in self._wanted() - self._staying:
                    self._staying.add(target)
                    tasks.create_task(self._stay(target), name=f"join {format_tcp(*target)}")
                await asyncio.sleep(min(self._delays.min_resolve_interval_s, self._config.join_resolve_interval_s))
                await self._wait_for_change()

    def _wanted(self) -> set[TcpAddress]:
        targets_of_names = {target for targets in self._resolved.values() for target in targets}
        return targets_of_names.union(*(self._siblings.get(target, ()) for target in targets_of_names))

    async def _look_up(self, gateway: TcpAddress) -> None:
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                hosts = await self._resolve(gateway.host)
        except (OSError, TimeoutError) as error:
            why = "no response" if isinstance(error, TimeoutError) else str(error.strerror or error)
            logger.warning("gateway %s cannot be resolved: %s", gateway.host, why)
        else:
            self._resolved[gateway] = [TcpAddress(host, gateway.port) for host in hosts]

    async def _wait_for_change(self) -> None:
        try:
            async with asyncio.timeout(self._config.join_resolve_interval_s):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _stay(self, target: TcpAddress) -> None:
        backoff = Backoff(initial_s=self._delays.initial_s, max_s=self._delays.max_s)
        loop = asyncio.get_running_loop()
        try:
            while target in self._wanted():
                started = loop.time()
                refused = await self._connect_once(target)
                await self._look_up_again()
                if refused:
                    await asyncio.sleep(self._config.join_refused_interval_s)
                    continue
                if loop.time() - started >= self._delays.max_s:
                    backoff.reset()  # the connection was stable
                await asyncio.sleep(backoff.next())
        finally:
            self._staying.discard(target)
            self._siblings.pop(target, None)

    async def _look_up_again(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._changed.set()
        await asyncio.wait([waiter], timeout=self._delays.resolve_wait_s)

    async def _connect_once(self, target: TcpAddress) -> bool:
        """Return after the connection was lost, or could not be made; whether the gateway will not accept it soon."""
        address = format_tcp(*target)
        try:
            await self._connect(address, on_hello=lambda hello: self._registered(target, hello))
            logger.warning("gateway %s: connection lost", address)
        except AlreadyJoined:
            return True
        except (NoWorkerReady, WorkerLost, ProtocolViolation) as error:
            why = "no process listens there" if isinstance(error, NoWorkerReady) else error.message
            logger.info("gateway %s: %s", address, why)
        except MedialaneError as error:
            logger.error("gateway %s refuses this worker: %s", address, error.message)
            # A handshake also fails if either side stalls, or while the secret is being replaced.
            return not isinstance(error, AuthenticationFailed)
        except Exception:  # the supervisor of one connection: its failure must not end the others
            logger.exception("gateway %s: joining failed and is retried", address)
        return False

    def _registered(self, target: TcpAddress, hello: Hello) -> None:
        self._siblings[target] = [TcpAddress(target.host, port) for port in hello.join_ports]
        self._changed.set()
