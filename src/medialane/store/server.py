"""The store's listening socket, its sessions, and what clients that have disconnected may still be using."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec

from medialane.arena import Arena, new_slot
from medialane.store.client_use import AbsentClients, ClientUse, UnknownEntry
from medialane.store.items import Items
from medialane.store.messages import PROTOCOL_VERSION, PassHolds, StoreHello, StoreStatus, StoreWelcome
from medialane.store.session import StoreSession
from medialane.transfer.pulls import Pulls
from medialane.types.errors import StartupFailed, StoreUnavailable
from medialane.types.tensor import ArenaOffer
from medialane.wire.config import RpcConfig
from medialane.wire.connection import Connection, check_version
from medialane.wire.listener import Listener

logger = logging.getLogger(__name__)

#: Longest time in which clients release what they do not use; a client whose event loop is healthy takes milliseconds.
RECLAIM_TIMEOUT_S = 0.5


class StoreServer:
    """Serves `items` to the gateways and workers of this host. Call `serve` once, and `close` in any case.

    `processor` returns the settings with which media are processed, empty if they are not or if that is not known yet;
    `status` returns what is reported to clients at each heartbeat. `on_damaged` is called if a client holds an entry
    that the table of an adopted arena does not have: its file has been set aside, and the process is to end.
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
        on_damaged: Callable[[], object] = lambda: None,
    ) -> None:
        self._items = items
        self._arena = arena
        self._config = config
        self._pulls = pulls
        self._max_connections = max_connections
        self._processor = processor
        self._status = status
        self._sessions: dict[StoreSession, None] = {}
        self._absent = AbsentClients(arena)
        self._on_damaged = on_damaged
        self._listener: Listener | None = None

    async def serve(self, address: str) -> None:
        """Start listening. Raises StartupFailed."""
        self._absent.take_over(self._items.embeddings)
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

    async def drain(self) -> None:
        """Wait until the calls that are being answered now have ended. Clients make later ones again at the next store,
        if this one is closed before."""
        if tasks := [task for session in self._sessions for task in session.tasks]:
            logger.info("draining: %d calls are being answered", len(tasks))
            await asyncio.wait(tasks)

    async def close(self) -> None:
        """Stop listening and close all connections. Idempotent."""
        if self._listener is not None:
            listener, self._listener = self._listener, None
            await listener.close()
        for session in list(self._sessions):
            session.connection.end(StoreUnavailable("the store is shutting down"))
        for session in list(self._sessions):
            await session.connection.closed.wait()
        self._absent.close()
        self._items.embeddings.close()

    def _open(self) -> Connection:
        return StoreSession(
            self, self._items, self._arena, self._config, pulls=self._pulls, absent=self._absent
        ).connection

    # The methods below are called by sessions; see session.SessionOwner.

    def opened(self, session: StoreSession) -> None:
        self._sessions[session] = None
        if len(self._sessions) > self._max_connections:
            logger.warning("more than %d connections (--store-max-connections)", self._max_connections)
            session.connection.end(StoreUnavailable("the store has reached its limit of connections"))

    def status(self) -> StoreStatus:
        return msgspec.structs.replace(self._status(), exposed_by=self._exposer())

    def register(self, session: StoreSession, hello: StoreHello) -> StoreWelcome:
        """Raises StartupFailed for a client of another release, or with other processor settings; StoreUnavailable if
        what it holds shows that the arena cannot be used."""
        check_version(hello.version, PROTOCOL_VERSION, ("client", "store"))
        self._check_processor(hello)
        session.slot, session.use = self._earlier_use(hello)
        try:
            session.use.keep_only(hello.holds if hello.arena == self._arena.id else {}, self._arena.claim)
        except UnknownEntry as error:
            logger.error("the arena of an earlier store cannot be used: %s", error)
            self._arena.set_aside()
            self._on_damaged()
            raise StoreUnavailable("the store begins with a new arena") from error
        self._absent.settle(session.slot)
        offer = ArenaOffer(self._arena.id, self._arena.nonce)
        return StoreWelcome(pid=os.getpid(), arena=offer, slot=session.slot, can_grant=self._pulls.can_grant)

    def pass_holds(self, passed: PassHolds) -> None:
        """Have the client that is named hold entries, if it is connected: otherwise it asks itself."""
        for session in self._sessions:
            if session.hello is not None and session.hello.client_id == passed.to:
                session.receive_holds(passed)

    async def reclaim(self) -> bool:
        before = self._arena.stats().pinned_bytes
        with suppress(TimeoutError):
            async with asyncio.timeout(RECLAIM_TIMEOUT_S):
                await asyncio.gather(*(s.reclaim() for s in self._sessions if s.hello is not None))
        return self._arena.stats().pinned_bytes < before

    def lost(self, session: StoreSession) -> None:
        self._sessions.pop(session, None)
        use, session.use = session.use, ClientUse()
        if session.hello is not None and len(use):
            self._absent.add(session.slot, use)
        else:
            use.end()

    def _exposer(self) -> str:
        """Return the id of the worker that has been connected for longest among those that are scraped; empty if there
        are gateways, which all have the series of their host."""
        scraped = [session.hello for session in self._sessions if session.hello is not None and session.hello.scraped]
        if not scraped or any(hello.scraped == "gateway" for hello in scraped):
            return ""
        return scraped[0].client_id

    def _check_processor(self, hello: StoreHello) -> None:
        """Raise StartupFailed if features made here would be others than the client wants."""
        ours, theirs = self._processor(), hello.processor
        if ours and theirs and ours != theirs:
            name = min(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
            here, there = ours.get(name), theirs.get(name)
            raise StartupFailed(f"processor setting {name} is {here} in the media store and {there} in this gateway")

    def _earlier_use(self, hello: StoreHello) -> tuple[int, ClientUse]:
        """Return the slot of the client, and what it used on its earlier connection, which is closed if it still
        exists. In another arena than ours, it has neither."""
        for other in self._sessions:
            if other.hello is not None and other.hello.client_id == hello.client_id:
                return other.slot, other.replace()
        if hello.arena == self._arena.id and hello.slot not in {other.slot for other in self._sessions}:
            return hello.slot, self._absent.take(hello.slot) or ClientUse()
        return new_slot(), ClientUse()
