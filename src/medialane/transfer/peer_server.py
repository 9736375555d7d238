"""The source's side of pulls: hosts' stores connect, and read entries for which they have a capability.

A connection is served by one task. An entry is held for its peer until the peer closes it; a peer that takes longer
than any pull does, or disappears, is disconnected, and the hold ends then: what the peer has received is not confirmed.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping

import msgspec

from medialane.arena import ENTRY_HEADER_BYTES, Arena, Cached, Pin
from medialane.transfer.mover import Mover
from medialane.transfer.peer_connection import (
    MAX_HELLO_BYTES,
    PEER_VERSION,
    CloseEntry,
    EntryClosed,
    EntryOpened,
    OpenEntry,
    PeerConnection,
    PeerHello,
    PeerRefused,
    PeerWelcome,
    SendPayload,
    decode_to_source,
    longest_hold_s,
)
from medialane.types.errors import HandoverFailed, ProtocolViolation, StartupFailed, TransferFailed, to_report
from medialane.types.feature import EntryKind, RemoteEntry
from medialane.types.media import EncodedMedia
from medialane.types.tensor import ArenaRange
from medialane.wire.address import parse_tcp
from medialane.wire.connection import check_version
from medialane.wire.listener import Listener
from medialane.wire.security import Authentication

logger = logging.getLogger(__name__)

#: Of authenticated peers; the one that has been idle for longest is closed first.
MAX_CONNECTIONS = 1024
HELLO_TIMEOUT_S = 5.0
#: For a peer to make space for a small message.
SMALL_SEND_TIMEOUT_S = 5.0
#: Longer than a destination keeps an idle connection.
IDLE_TIMEOUT_S = 120.0

#: A worker asks for the entry as soon as it has received the request.
CAPABILITY_LIFETIME_S = 120.0


class Capabilities:
    """Gives the right to read one entry of our arena to another host's store, without state on our side.

    The key is random, made at the store's start: no capability outlives its store. `address` is our peer
    listener. `expires_ms` counts on our own clock, so the other hosts' clocks do not matter.
    """

    def __init__(self, address: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.address = address
        self._key = secrets.token_bytes(32)
        self._clock = clock

    def give(self, granted: ArenaRange, kind: EntryKind, key: str) -> RemoteEntry:
        expires_ms = int((self._clock() + CAPABILITY_LIFETIME_S) * 1000)
        mac = self._mac(granted, kind, key, expires_ms)
        return RemoteEntry(granted, kind, key, self.address, expires_ms, mac)

    def check(self, entry: RemoteEntry) -> None:
        """Raises HandoverFailed if we did not give this capability, or it has expired."""
        mac = self._mac(entry.range, entry.kind, entry.key, entry.expires_ms)
        if not hmac.compare_digest(mac, entry.capability):
            raise HandoverFailed("the capability is not one of this store")
        if entry.expires_ms < self._clock() * 1000:
            raise HandoverFailed("the capability has expired")

    def _mac(self, granted: ArenaRange, kind: EntryKind, key: str, expires_ms: int) -> bytes:
        signed = msgspec.msgpack.encode((granted, kind, key, expires_ms))  # a list of fixed length: unambiguous
        return hmac.digest(self._key, signed, hashlib.sha256)


class PeerServer:
    """`serve` once, and `close` in any case. Stores may read our arena by `mover`, too; if it is preferred, stores that
    leave the choice to us are offered it."""

    def __init__(
        self, arena: Arena, authentication: Authentication, mover: Mover | None, *, prefers_mover: bool
    ) -> None:
        self._arena = arena
        self._authentication = authentication
        self._mover = mover
        self._prefers_mover = prefers_mover
        self._tasks: dict[PeerConnection, asyncio.Task[None]] = {}
        self._idle: dict[PeerConnection, None] = {}  # for longest first
        self._listener: Listener | None = None
        self._file = -1
        #: Gives capabilities; None if other stores cannot connect.
        self.capabilities: Capabilities | None = None

    @property
    def num_connections(self) -> int:
        """Of authenticated peers."""
        return len(self._tasks)

    async def serve(self, address: str) -> str:
        """Listen at a TCP address; with port 0 the kernel chooses one. Returns the address. Raises StartupFailed."""
        if parse_tcp(address, "--peer-listen").host in ("0.0.0.0", "::"):  # noqa: S104 - refused
            raise StartupFailed(
                f"--peer-listen {address}: other stores connect to this address, so it must be one of a host"
            )
        self._file = os.open(self._arena.path, os.O_RDONLY | os.O_CLOEXEC)
        self._listener = await Listener.listen(address, lambda: PeerConnection(self._opened), self._authentication)
        self.capabilities = Capabilities(self._listener.address)
        return self._listener.address

    async def close(self) -> None:
        """Stop listening, end all connections, and release what they hold. Idempotent."""
        self.capabilities = None
        if self._listener is not None:
            listener, self._listener = self._listener, None
            await listener.close()
        tasks = dict(self._tasks)
        for task in tasks.values():
            task.cancel()
        if tasks:
            await asyncio.wait([*tasks.values(), *(connection.closed for connection in tasks)])
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _opened(self, connection: PeerConnection) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(connection), name="serving a store")
        self._tasks[connection] = task
        task.add_done_callback(lambda _: self._ended(connection, task))
        if len(self._tasks) > MAX_CONNECTIONS:
            dropped = next(iter(self._idle), connection)
            self._idle.pop(dropped, None)
            dropped.abort()

    def _ended(self, connection: PeerConnection, task: asyncio.Task[None]) -> None:
        self._tasks.pop(connection)
        self._idle.pop(connection, None)
        connection.abort()
        if not task.cancelled() and (error := task.exception()) is not None:  # a bug: no other connection is affected
            logger.error("a store's connection failed", exc_info=error)

    async def _serve(self, connection: PeerConnection) -> None:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                await self._welcome(connection)
            while True:
                self._idle[connection] = None
                async with asyncio.timeout(IDLE_TIMEOUT_S):
                    message = await connection.receive(decode_to_source)
                self._idle.pop(connection, None)
                match message:
                    case OpenEntry(entry):
                        await self._serve_entry(connection, entry)
                    case SendPayload():
                        pass  # sent with an OpenEntry that was refused
                    case _:
                        raise _unexpected(message)
        except (TransferFailed, TimeoutError):  # the peer has closed the connection, or stopped
            return
        except ProtocolViolation as error:
            logger.warning("ending the connection of a store: %s", error.message)

    async def _welcome(self, connection: PeerConnection) -> None:
        hello = await connection.receive(decode_to_source, MAX_HELLO_BYTES)
        if not isinstance(hello, PeerHello):
            raise _unexpected(hello)
        try:
            check_version(hello.version, PEER_VERSION, ("other host's store", "store"))
        except StartupFailed as error:
            await connection.send(PeerRefused(to_report(error)))
            raise ProtocolViolation(error.message) from error
        await connection.send(PeerWelcome(self._arena.id))
        if self._mover is not None:
            self._mover.is_ready()  # if not, it starts now rather than at the first entry

    async def _serve_entry(self, connection: PeerConnection, entry: RemoteEntry) -> None:
        """Hold the entry until the peer closes it. If that fails, until the connection is closed: the kernel may still
        send what it refers to."""
        try:
            pin = self._pin(entry)
        except HandoverFailed as error:
            async with asyncio.timeout(SMALL_SEND_TIMEOUT_S):
                await connection.send(PeerRefused(to_report(error)))
            return
        try:
            async with asyncio.timeout(longest_hold_s(pin.range.nbytes)):
                await connection.send(_opened(pin.value, await self._offers(entry)))
                await self._send_parts(connection, pin)
        except BaseException:  # cancellation included: the pin has no other owner
            connection.closed.add_done_callback(lambda _: pin.release())
            connection.abort()
            raise
        pin.release()
        async with asyncio.timeout(SMALL_SEND_TIMEOUT_S):
            await connection.send(EntryClosed())

    async def _send_parts(self, connection: PeerConnection, pin: Pin[Cached | None]) -> None:
        payload_bytes = pin.range.nbytes - ENTRY_HEADER_BYTES
        while True:
            match message := await connection.receive(decode_to_source):
                case SendPayload(start, stop) if 0 <= start <= stop <= payload_bytes:
                    offset = pin.range.offset + ENTRY_HEADER_BYTES + start
                    await connection.send_file(self._file, offset, stop - start)
                case SendPayload():
                    raise ProtocolViolation("the part is not one of the payload")
                case CloseEntry():
                    return
                case _:
                    raise _unexpected(message)

    def _pin(self, entry: RemoteEntry) -> Pin[Cached | None]:
        """Raises HandoverFailed."""
        if self.capabilities is None:
            raise HandoverFailed("the store is stopping")
        self.capabilities.check(entry)
        if (pin := self._arena.claim(entry.range)) is None:
            raise HandoverFailed("the entry is no longer in its store")
        return pin

    async def _offers(self, entry: RemoteEntry) -> Mapping[str, bytes]:
        offers, mover = {"tcp": b""}, self._mover
        if mover is not None and (entry.mover == mover.name or (entry.mover == "auto" and self._prefers_mover)):
            offer = await mover.offer(wait=entry.mover == mover.name)
            if offer is not None:
                offers[mover.name] = offer
        return offers


def _opened(value: Cached | None, offers: Mapping[str, bytes]) -> EntryOpened:
    if isinstance(value, EncodedMedia):
        return EntryOpened(encoded=value, offers=dict(offers))
    return EntryOpened(feature=value, offers=dict(offers))


def _unexpected(message: object) -> ProtocolViolation:
    return ProtocolViolation(f"unexpected {type(message).__name__}")
