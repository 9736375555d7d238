"""The gateway's listening socket for workers that join: accepts connections and reads Join."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable

from medialane.gateway.workers.client import RpcClient
from medialane.types.errors import MedialaneError, StartupFailed, WorkerLost, report_of
from medialane.wire.authentication import Role
from medialane.wire.config import RpcConfig
from medialane.wire.connection import Connection, check_version
from medialane.wire.listener import END_TIMEOUT_S, Listener, PendingConnections
from medialane.wire.protocol import PROTOCOL_VERSION, Join
from medialane.wire.security import Authentication, Security

logger = logging.getLogger(__name__)

#: Names of workers appear in logs and as values of metric labels.
_NAME = re.compile(r"[\w.:/@+-]{1,200}", re.ASCII)


class JoinServer:
    """`serve_worker` is called, in a task per connection, with the Join of a worker whose version matches and with its
    connection, and returns when that is closed; it raises MedialaneError to refuse the worker. Call `serve` once, and
    `close` in any case."""

    def __init__(self, config: RpcConfig, serve_worker: Callable[[Join, RpcClient], Awaitable[None]]) -> None:
        self._config = config
        self._serve_worker = serve_worker
        self._listener: Listener | None = None
        self._unidentified: PendingConnections[RpcClient] = PendingConnections(
            lambda client: client.connection.end(WorkerLost("too many unidentified connections"))
        )
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, address: str) -> str:
        """Start listening; return the address to connect to. Raises StartupFailed if it cannot."""
        authentication = Authentication(Security.load(self._config), "rpc", Role.GATEWAY, Role.WORKER)
        self._listener = await Listener.listen(address, self._open_connection, authentication)
        return self._listener.address

    async def close(self) -> None:
        """Stop listening, and close all connections. Idempotent."""
        if self._listener is not None:
            listener, self._listener = self._listener, None
            await listener.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=END_TIMEOUT_S)

    def _open_connection(self) -> Connection:
        return RpcClient(self._config, on_open=self._admit).connection

    def _admit(self, client: RpcClient) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(client), name="joining worker")
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._ended(client, task))  # a task may be cancelled before its first step
        self._unidentified.add(client, "a process that has not sent Join")

    async def _serve(self, client: RpcClient) -> None:
        try:
            async with asyncio.timeout(self._config.heartbeat_timeout_s):
                join = await self._join(client)
            if join is not None:
                await self._serve_worker(join, client)
        except TimeoutError:
            logger.info("a connection without a Join is closed")
        except MedialaneError as error:
            client.refuse(error)
        except Exception as error:  # noqa: BLE001 - the supervisor: the failure of one worker must not affect others
            report_of(error, "joining worker")

    def _ended(self, client: RpcClient, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._unidentified.discard(client)
        client.leave()

    async def _join(self, client: RpcClient) -> Join | None:
        """Return the Join of a connection; None if it was closed before. Raises StartupFailed."""
        await asyncio.wait([client.join])
        self._unidentified.discard(client)
        if client.join.cancelled():
            return None
        join = client.join.result()
        check_version(join.version, PROTOCOL_VERSION, ("worker", "gateway"))
        if not _NAME.fullmatch(join.name):
            raise StartupFailed("the worker's name must have 1 to 200 letters, digits or characters of _.:/@+-")
        return join
