"""The work that gateways which limit the queue have sent to a worker, and that has no first token yet.

Theory of operation. A gateway that sees room at an engine sends what is next in its own queue, and so do all other
gateways that see it in the same milliseconds: each knows what the others have sent only once it was told. The worker
gets them one after the other. So each request says behind how long a queue it may be put, and one that comes too late
is sent back, to wait where it can be reordered, refused and forgotten. Its gateway is the next one to have a request
accepted: else that whose request has ended, which is the first to know of the room, would have it every time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

from medialane.types.errors import WorkerQueued
from medialane.types.request import EngineRequest

#: For so long room is kept for the gateway that is next: it is told in 1 to 3 ms, and looks every 5 ms.
_KEPT_S: Final = 0.01


class _Rank:
    """One engine's queue. `refused` are the gateways whose requests were sent back, in this order."""

    def __init__(self) -> None:
        self.work: dict[object, float] = {}
        self.refused: dict[object, None] = {}
        self.left_at = float("-inf")


class WorkQueue:
    """Of all gateways of one worker; one event loop."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}

    def enter(self, request: EngineRequest, gateway: object) -> Callable[[], None]:
        """Count a request, if it has a place; return what ends that, idempotent. Raises WorkerQueued."""
        place = request.place
        if place is None:
            return _nothing
        rank = self._ranks.setdefault(request.data_parallel_rank or 0, _Rank())
        is_long = bool(rank.work) and sum(rank.work.values()) > place.max_queue_ms
        if is_long or (place.max_queue_ms < math.inf and self._is_kept(rank, gateway)):
            rank.refused.setdefault(gateway)
            raise WorkerQueued("requests of other gateways came first")
        rank.refused.pop(gateway, None)
        key = object()
        rank.work[key] = place.work_ms

        def leave() -> None:
            if rank.work.pop(key, None) is not None:
                rank.left_at = time.monotonic()

        return leave

    def forget(self, gateway: object) -> None:
        """The gateway's connection is closed: no room is kept for it."""
        for rank in self._ranks.values():
            rank.refused.pop(gateway, None)

    def _is_kept(self, rank: _Rank, gateway: object) -> bool:
        """Return whether room is kept for another gateway. One that has not used it in time waits like any other."""
        if time.monotonic() - rank.left_at < _KEPT_S:
            return next(iter(rank.refused), gateway) is not gateway
        while rank.refused and (first := next(iter(rank.refused))) is not gateway:
            del rank.refused[first]
        return False


def _nothing() -> None:
    """A request without a place has left no trace."""
