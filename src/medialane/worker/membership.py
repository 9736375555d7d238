"""Keeps this worker connected to the gateways that it was given (`--join`).

Theory of operation. Each name is resolved regularly, and after every loss; the worker connects to every address, and to
the other gateways of that address's host, whose ports a gateway reports. One task per address connects, serves the
connection until it ends, and tries again with exponential backoff, until the name no longer resolves to the address. A
connection is never ended because of the DNS: while it lasts, the gateway is there. If a name cannot be resolved, its
last addresses count.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol

from medialane.runtime.tasks import Backoff
from medialane.types.errors import (
    AlreadyJoined,
    AuthenticationFailed,
    MedialaneError,
    NoWorkerReady,
    ProtocolViolation,
    WorkerLost,
)
from medialane.wire.address import TcpAddress, format_tcp
from medialane.wire.protocol import Hello
from medialane.worker.config import WorkerConfig

logger = logging.getLogger(__name__)

RESOLVE_TIMEOUT_S = 10.0


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
    """`run` keeps the worker connected. One event loop."""

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
