"""The store's listening socket, its sessions, and what clients that have disconnected may still be using."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec

from medialane.arena import Arena
from medialane.core.errors import StartupFailed, StoreUnavailable
from medialane.core.tensor import ArenaOffer
from medialane.peers.pulls import Pulls
from medialane.store.client_use import ClientUse
from medialane.store.items import Items
from medialane.store.messages import PROTOCOL_VERSION, PassHolds, StoreHello, StoreStatus, StoreWelcome
from medialane.store.session import StoreSession
from medialane.wire.config import RpcConfig
from medialane.wire.connection import Connection
from medialane.wire.listener import Listener
from medialane.wire.registration import check_version

logger = logging.getLogger(__name__)

#: Longest time in which clients release what they do not use; a client whose event loop is healthy takes milliseconds.
RECLAIM_TIMEOUT_S = 0.5


class StoreServer:
    """Serves `items` to the gateways and workers of this host. Call `serve` once, and `close` in any case.

    `processor` returns the settings with which media are processed, empty if they are not or if that is not known yet;
    `status` returns what is reported to clients at each heartbeat.
    """

    def __init__(
        self,
        items: Items,
        arena: Arena,
        config: RpcConfig,
        *,
        pulls: Pulls,
        max_connections: int,
        processor: Callable[[], Mapping[str, str]],
        status: Callable[[], StoreStatus],
    ) -> None:
        self._items = items
        self._arena = arena
        self._config = config
        self._pulls = pulls
        self._max_connections = max_connections
        self._processor = processor
        self._status = status
        self._sessions: dict[StoreSession, None] = {}
        self._departed = DepartedClients()
        self._listener: Listener | None = None

    async def serve(self, address: str) -> None:
        """Start listening. Raises StartupFailed."""
        self._listener = await Listener.listen(address, self._open)

    def loaded(self) -> None:
        """The processor's settings are known: refuse clients that want features of others."""
        for session in list(self._sessions):
            if session.hello is not None:
                try:
                    self._check_processor(session.hello)
                except StartupFailed as error:
                    session.refuse(error)

    def started(self) -> None:
        """Report the status to all clients now."""
        for session in self._sessions:
            if session.hello is not None:
                session.beat()

    async def close(self) -> None:
        """Stop listening and close all connections. Idempotent."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for session in list(self._sessions):
            session.connection.end(StoreUnavailable("the store is shutting down"))
        for session in list(self._sessions):
            await session.connection.closed.wait()
        self._departed.close()
        self._items.embeddings.close()

    def _open(self) -> Connection:
        return StoreSession(
            self._items,
            self._arena,
            self._config,
            pulls=self._pulls,
            register=self._register,
            status=self._status_now,
            pass_holds=self._pass_holds,
            reclaim=self._reclaim,
            on_open=self._admit,
            on_lost=self._lost,
        ).connection

    def _admit(self, session: StoreSession) -> None:
        self._sessions[session] = None
        if len(self._sessions) > self._max_connections:
            logger.warning("more than %d connections (--store-max-connections)", self._max_connections)
            session.connection.end(StoreUnavailable("the store has reached its limit of connections"))

    def _status_now(self) -> StoreStatus:
        return msgspec.structs.replace(self._status(), exposed_by=self._exposer())

    def _exposer(self) -> str:
        """Return the id of the worker that has been connected for longest among those that are scraped; empty if there
        are gateways, which all have the series of their host."""
        scraped = [session.hello for session in self._sessions if session.hello is not None and session.hello.scraped]
        if not scraped or any(hello.scraped == "gateway" for hello in scraped):
            return ""
        return scraped[0].client_id

    def _register(self, session: StoreSession, hello: StoreHello) -> StoreWelcome:
        """Raises StartupFailed for a client of another release, or with other processor settings."""
        check_version(hello.version, PROTOCOL_VERSION, ("client", "store"))
        self._check_processor(hello)
        session.use = self._earlier_use(hello)
        session.use.keep_only(hello.holds if hello.arena == self._arena.id else ())
        offer = ArenaOffer(self._arena.id, self._arena.nonce)
        return StoreWelcome(pid=os.getpid(), arena=offer, can_grant=self._pulls.can_grant)

    def _check_processor(self, hello: StoreHello) -> None:
        """Raise StartupFailed if features made here would be others than the client wants."""
        ours, theirs = self._processor(), hello.processor
        if ours and theirs and ours != theirs:
            name = min(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
            here, there = ours.get(name), theirs.get(name)
            raise StartupFailed(f"processor setting {name} is {here} in the media store and {there} in this gateway")

    def _pass_holds(self, passed: PassHolds) -> None:
        """Have the client that is named hold entries, if it is connected: otherwise it asks itself."""
        for session in self._sessions:
            if session.hello is not None and session.hello.client_id == passed.to:
                session.receive_holds(passed)

    async def _reclaim(self) -> bool:
        """Have clients release what they hold without using it. Return whether any hold has ended meanwhile."""
        before = self._arena.stats().pinned_bytes
        with suppress(TimeoutError):
            async with asyncio.timeout(RECLAIM_TIMEOUT_S):
                await asyncio.gather(*(s.reclaim() for s in self._sessions if s.hello is not None))
        return self._arena.stats().pinned_bytes < before

    def _earlier_use(self, hello: StoreHello) -> ClientUse:
        """Return what the client held on its earlier connection, which is closed if it still exists."""
        for other in self._sessions:
            if other.hello is not None and other.hello.client_id == hello.client_id:
                return other.replace()
        return self._departed.take(hello.client_id) or ClientUse()

    def _lost(self, session: StoreSession) -> None:
        self._sessions.pop(session, None)
        pidfd, session.pidfd = session.pidfd, None
        if session.hello is not None and len(session.use) and pidfd is not None:
            self._departed.add(session.hello.client_id, session.use, pidfd)
            return
        session.use.end()
        if pidfd is not None:
            os.close(pidfd)


class DepartedClients:
    """Clients that have disconnected and may still be using entries, until their process has exited or they connect
    again."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[ClientUse, int]] = {}  # the second is a pidfd

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, client_id: str, use: ClientUse, pidfd: int) -> None:
        """End `use` when the process has exited, unless it is taken before. Owns both."""
        self._waiting[client_id] = use, pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._exited, client_id)

    def take(self, client_id: str) -> ClientUse | None:
        """Return what the client held: it has connected again."""
        waiting = self._waiting.pop(client_id, None)
        if waiting is None:
            return None
        use, pidfd = waiting
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        return use

    def close(self) -> None:
        for client_id in list(self._waiting):
            self._exited(client_id)

    def _exited(self, client_id: str) -> None:
        if (use := self.take(client_id)) is not None:
            use.end()
