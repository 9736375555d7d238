"""Two stores' arenas in one process, and peers that misbehave: a scripted source and a scripted destination."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from typing import Any

from handshakes import handshake
from medialane.arena import ENTRY_HEADER_BYTES, Arena, ArenaConfig, Pin, layout
from medialane.transfer import Mover, Pulls
from medialane.transfer.peer_connection import (
    PROTOCOL,
    EntryOpened,
    PeerConnection,
    PeerHello,
    PeerWelcome,
    decode_from_source,
    decode_to_source,
)
from medialane.types.errors import MedialaneError
from medialane.types.feature import Feature, RemoteEntry
from medialane.types.media import MediaSize
from medialane.types.tensor import TensorDescriptor, TensorSpec
from medialane.wire import Authentication, Listener, Role, RpcConfig, Security, dial

RPC = RpcConfig()
AUTHENTICATION = Authentication(Security.load(RPC), PROTOCOL, Role.STORE, Role.STORE)
MIB = 1 << 20


class Host:
    """The arena of one host and its pulls. `close` checks that nothing is held."""

    def __init__(self, rpc: RpcConfig = RPC, mover: Mover | None = None, **settings: Any) -> None:
        self.arena = Arena.create(ArenaConfig(size_bytes=16 * MIB))
        self.pulls = Pulls(self.arena, rpc, mover, **settings)
        self.address = ""

    async def serve(self) -> None:
        self.address = await self.pulls.serve("tcp://127.0.0.1:0")

    async def close(self) -> None:
        await self.pulls.close()
        stats = self.arena.stats()
        self.arena.close()
        assert (stats.num_leases, stats.num_reservations) == (0, 0)

    def store(self, key: str, num_bytes: int = MIB) -> Pin[Feature]:
        """Publish a feature of the bytes of `pattern`, in two tensors."""
        specs = (TensorSpec("uint8", (num_bytes - 100,)), TensorSpec("uint8", (100,)))
        offsets, size = layout(specs)
        reservation = self.arena.reserve(size)
        reservation.buffer[:] = pattern(key, size)
        tensors = tuple(TensorDescriptor(s, reservation.range, o) for s, o in zip(specs, offsets, strict=True))
        return self.arena.publish(reservation, key, Feature("image", key, b"header", tensors, MediaSize(width=3)))

    def grant(self, pin: Pin[Feature]) -> RemoteEntry:
        return self.pulls.grant([pin.range])[0]

    def payload(self, pin: Pin[Feature]) -> bytes:
        return bytes(self.arena.view.entry(pin.range)[ENTRY_HEADER_BYTES:])


def pattern(key: str, num_bytes: int) -> bytes:
    return (key.encode() * (num_bytes // len(key) + 1))[:num_bytes]


async def connect(address: str) -> PeerConnection:
    """Return a registered connection to a store, to misbehave on."""
    peer = await dialled(address)
    await peer.send(PeerHello("0" * 32))
    await peer.receive(decode_from_source)
    return peer


async def dialled(address: str) -> PeerConnection:
    """Return a connection on which nothing has been sent."""
    peer = PeerConnection()
    await dial(address, peer, AUTHENTICATION)
    return peer


def greeting(secret: str) -> bytes:
    """What a store that dials another one sends first."""
    return handshake(secret, protocol=PROTOCOL, role=Role.STORE, peer_role=Role.STORE).greeting


async def send_bytes(peer: PeerConnection, data: bytes) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        await peer.send_file(file.fileno(), 0, len(data))


class ScriptedSource:
    """Another host's store: `script` is run for each connection that is registered, which is closed at its end."""

    def __init__(self, script: Callable[[PeerConnection], Awaitable[None]]) -> None:
        self._script = script
        self._listener: Listener | None = None
        self.address = ""
        self._tasks: list[asyncio.Task[None]] = []

    async def listen(self) -> None:
        self._listener = await Listener.listen(
            "tcp://127.0.0.1:0", lambda: PeerConnection(self._opened), AUTHENTICATION
        )
        self.address = self._listener.address

    def entry(self, key: str, pin: Pin[Feature]) -> RemoteEntry:
        """Return an entry that is like the one of `pin`, at this address."""
        return RemoteEntry(pin.range, "processed", key, self.address, 0, b"")

    async def ended(self) -> None:
        """Wait until all scripts have ended."""
        await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        """Idempotent."""
        if self._listener is not None:
            await self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _connection(self) -> PeerConnection:
        return PeerConnection(self._opened)

    def _opened(self, peer: PeerConnection) -> None:
        self._tasks.append(asyncio.create_task(self._serve(peer)))

    async def _serve(self, peer: PeerConnection) -> None:
        try:
            await peer.receive(decode_to_source)
            await peer.send(PeerWelcome("f" * 32))
            await self._script(peer)
        except MedialaneError:
            """The destination has disconnected."""
        finally:
            peer.abort()
            await peer.closed


async def opening(peer: PeerConnection, feature: Feature) -> None:
    """Answer OpenEntry, and receive SendPayload."""
    await peer.receive(decode_to_source)
    await peer.send(EntryOpened(feature=feature, offers={"tcp": b""}))
    await peer.receive(decode_to_source)
