"""Two stores' arenas in one process, and peers that misbehave: a scripted source and a scripted destination."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from medialane.arena import ENTRY_HEADER_BYTES, Arena, ArenaConfig, Lease, layout
from medialane.core.errors import MedialaneError
from medialane.core.feature import Feature
from medialane.core.media import MediaSize
from medialane.core.remote_entry import RemoteEntry
from medialane.core.tensor import TensorDescriptor, TensorSpec
from medialane.peers.peer_messages import MAX_MESSAGE_BYTES, PROTOCOL, EntryOpened, PeerHello, PeerWelcome
from medialane.peers.peer_socket import PeerSocket
from medialane.peers.pulls import Pulls
from medialane.wire.address import parse_address
from medialane.wire.authentication import Role
from medialane.wire.config import RpcConfig
from medialane.wire.security import Security

RPC = RpcConfig()
AUTHENTICATION = Security.load(RPC).authentication(PROTOCOL, Role.STORE, Role.STORE)
MIB = 1 << 20


class Host:
    """The arena of one host and its pulls. `close` checks that nothing is held."""

    def __init__(self, rpc: RpcConfig = RPC) -> None:
        self.arena = Arena.create(ArenaConfig(size_bytes=16 * MIB))
        self.pulls = Pulls(self.arena, rpc)

    async def serve(self) -> str:
        return await self.pulls.serve("tcp://127.0.0.1:0")

    async def close(self) -> None:
        await self.pulls.close()
        await asyncio.sleep(0)  # leases that threads have ended
        stats = self.arena.stats()
        self.arena.close()
        assert (stats.num_leases, stats.num_reservations) == (0, 0)

    def store(self, key: str, num_bytes: int = MIB) -> Lease[Feature]:
        """Publish a feature of the bytes of `pattern`, in two tensors."""
        specs = (TensorSpec("uint8", (num_bytes - 100,)), TensorSpec("uint8", (100,)))
        offsets, size = layout(specs)
        reservation = self.arena.reserve(size)
        reservation.buffer[:] = pattern(key, size)
        tensors = tuple(TensorDescriptor(s, reservation.range, o) for s, o in zip(specs, offsets, strict=True))
        return self.arena.publish(reservation, key, Feature("image", key, b"header", tensors, MediaSize(width=3)))

    def grant(self, lease: Lease[Feature]) -> RemoteEntry:
        return self.pulls.grant([lease.range])[0]

    def payload(self, lease: Lease[Feature]) -> bytes:
        return bytes(self.arena.view.entry(lease.range)[ENTRY_HEADER_BYTES:])


def pattern(key: str, num_bytes: int) -> bytes:
    return (key.encode() * (num_bytes // len(key) + 1))[:num_bytes]


def connect(address: str) -> PeerSocket:
    """Return a registered connection to a store, to misbehave on."""
    target = parse_address(address)
    peer = PeerSocket(socket.create_connection(target, 5))
    peer.authenticate(AUTHENTICATION, dialled_host=target.host)
    peer.send(PeerHello("0" * 32))
    peer.receive(MAX_MESSAGE_BYTES)
    return peer


class ScriptedSource:
    """Another host's store: `script` is run in a thread for each connection that is registered."""

    def __init__(self, script: Callable[[PeerSocket], None]) -> None:
        self._script = script
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_connections = 0
        self.errors: list[Exception] = []
        self._peers: list[PeerSocket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def entry(self, key: str, lease: Lease[Feature]) -> RemoteEntry:
        """Return an entry that is like the one of `lease`, at this address."""
        return RemoteEntry(lease.range, "processed", key, self.address, 0, b"")

    def close(self) -> None:
        """Idempotent."""
        with suppress(OSError):  # it is closed already
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for peer in self._peers:
            peer.abort()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            peer = PeerSocket(sock)
            self._peers.append(peer)
            self._threads.append(threading.Thread(target=self._serve, args=(peer,)))
            self._threads[-1].start()

    def _serve(self, peer: PeerSocket) -> None:
        try:
            peer.authenticate(AUTHENTICATION)
            peer.receive(MAX_MESSAGE_BYTES)
            peer.send(PeerWelcome("f" * 32))
            self._script(peer)
        except (MedialaneError, OSError) as error:
            self.errors.append(error)
        finally:
            peer.close()


def opening(peer: PeerSocket, feature: Feature) -> None:
    """Answer OpenEntry, and receive SendPayload."""
    peer.receive(MAX_MESSAGE_BYTES)
    peer.send(EntryOpened(feature=feature, offers={"tcp": b""}))
    peer.receive(MAX_MESSAGE_BYTES)
