"""Pulls in both directions: other hosts' stores copy our entries, and we copy theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from medialane.arena import Arena, Cached, Lease, Reservation
from medialane.core.errors import HandoverFailed
from medialane.core.remote_entry import MoverName, RemoteEntry
from medialane.core.stats import PullStats
from medialane.core.tensor import ArenaRange
from medialane.peers.mover import Mover
from medialane.peers.peer_server import PeerServer
from medialane.peers.puller import Puller
from medialane.peers.tcp import TcpMover
from medialane.wire.config import RpcConfig
from medialane.wire.security import Security


class Pulls:
    """Owns the movers, best first, to which tcp is added, with at most `max_streams` connections for an entry. Entries
    can be granted after `serve`. `close` in any case, after the sessions of the store's clients."""

    def __init__(
        self,
        arena: Arena,
        rpc: RpcConfig,
        movers: Sequence[Mover] = (),
        *,
        max_streams: int = 4,
    ) -> None:
        """Raises StartupFailed for unusable files of the settings."""
        security = Security.load(rpc)
        self._arena = arena
        self._puller = Puller(arena, security, [*movers, TcpMover()], max_streams=max_streams)
        self._server = PeerServer(arena, security, movers)

    async def serve(self, address: str) -> str:
        """Let other hosts' stores connect. Returns the address, with the port that was chosen for port 0. Raises
        StartupFailed."""
        return await self._server.serve(address)

    async def close(self) -> None:
        """Idempotent."""
        await self._puller.close()
        await self._server.close()

    @property
    def can_grant(self) -> bool:
        return self._server.capabilities is not None

    @property
    def stats(self) -> PullStats:
        return self._puller.stats

    def grant(self, ranges: Sequence[ArenaRange]) -> list[RemoteEntry]:
        """Return the right to copy entries that a client holds. Raises HandoverFailed."""
        return [self._grant(found) for found in ranges]

    async def pull(self, entries: Sequence[RemoteEntry]) -> list[Lease[Cached]]:
        """Return leases on copies of the entries, which the caller owns: all or none. Raises what `Puller.pull`
        raises."""
        pulling = [asyncio.ensure_future(self._puller.pull(entry)) for entry in entries]
        try:
            return await asyncio.gather(*pulling)
        except BaseException:  # cancellation included: the leases have no other owner
            for task in pulling:
                task.cancel()
            for result in await asyncio.gather(*pulling, return_exceptions=True):
                if isinstance(result, Lease):
                    result.release()
            raise

    def mover_of(self, copy: ArenaRange) -> MoverName | None:
        """See `Puller.mover_of`."""
        return self._puller.mover_of(copy)

    async def fill(self, reservation: Reservation, read: Callable[[], Awaitable[None]]) -> None:
        """See `Puller.fill`."""
        await self._puller.fill(reservation, read)

    def _grant(self, found: ArenaRange) -> RemoteEntry:
        capabilities, key = self._server.capabilities, self._arena.key_of(found)
        if capabilities is None:
            raise HandoverFailed("other hosts' stores cannot connect to this one (--peer-listen)")
        if key is None:
            raise HandoverFailed("the request's media are no longer held")
        return capabilities.give(found, *key)
