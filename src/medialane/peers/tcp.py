"""The tcp mover: the source sends the payload over the connection on which the entry was opened, and over others if it
is large."""

from __future__ import annotations

from medialane.core.remote_entry import MoverName
from medialane.peers.mover import Destination, OpenedEntry


class TcpMover:
    """No late landing: only threads in `receive` write to the destination, and `receive` waits for them."""

    name: MoverName = "tcp"

    def is_ready(self) -> bool:
        return True

    async def offer(self, *, wait: bool) -> bytes | None:
        return b""

    async def read(self, source: OpenedEntry, destination: Destination, *, deadline_s: float) -> None:
        await source.receive(destination.payload, deadline_s)

    async def close(self) -> None:
        """There is nothing to end: `receive` ends with its deadline."""
