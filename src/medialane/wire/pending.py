"""A bound on connections whose peers have not identified themselves yet: in a handshake, or without a first message."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

#: Most of them, unless the owner has another limit.
MAX_PENDING = 64

T = TypeVar("T")


class PendingConnections(Generic[T]):
    """Above the limit, the oldest connection is dropped of the address that has most: a peer that means well needs
    milliseconds, so neither stalled peers nor one address exclude others. `drop` closes a connection."""

    def __init__(self, drop: Callable[[T], object]) -> None:
        self._drop = drop
        self._addresses: dict[T, str] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, connection: T, address: str, *, limit: int = MAX_PENDING) -> None:
        """Add a connection from an IP address, or from wherever the log is to name. With a limit of 0 it is dropped."""
        self._addresses[connection] = address
        if len(self._addresses) > limit:
            self.drop_one(f"too many connections: {max(limit, 0)} may be pending")

    def discard(self, connection: T) -> None:
        """The peer has identified itself, or the connection is closed. Idempotent."""
        self._addresses.pop(connection, None)

    def drop_one(self, reason: str) -> None:
        if not self._addresses:
            return
        ((crowded, _),) = Counter(self._addresses.values()).most_common(1)
        oldest = next(connection for connection, address in self._addresses.items() if address == crowded)
        del self._addresses[oldest]
        logger.warning("a connection from %s is closed: %s", crowded, reason)
        self._drop(oldest)
