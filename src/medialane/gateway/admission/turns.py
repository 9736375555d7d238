"""Turns of the gateways of a port at sending what has waited.

Theory of operation. An engine that has room again is seen by all gateways in the same milliseconds. If each of them has
requests waiting, each sends one, and the engine gets as many as there are gateways; what the others have sent is known
only once workers have relayed it. So each gateway notes, in memory that all of them map, since when its oldest request
waits and when it last sent one. Who has the oldest request goes first, and after that the others look again a little
later. A gateway that does not use its turn, because it is stopped, was killed or does not see the room, holds up the
others for some milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from medialane.gateway.admission.shared_counts import ADMITTED_AT, OLDEST_MS, SharedCounts

#: In which workers relay to a gateway what another one has sent: 1 to 3 ms, more on a busy machine.
_RELAYED_S: Final = 0.01
#: How long room is left to each gateway with an older request: they look every 5 ms.
_LEFT_S: Final = 0.01


class Turns:
    """`clock` is in seconds, the same for all processes of the host."""

    def __init__(self, counts: SharedCounts, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._counts = counts
        self._clock = clock
        self._own = 0.0
        self._room_at: float | None = None

    def wait_since(self, since: float | None) -> None:
        """Note since when the oldest request waits here; None if none does."""
        self._counts.set_own(OLDEST_MS, 0 if since is None else int(since * 1000))

    def has(self) -> bool:
        """Return whether this gateway may use the room that it sees."""
        now, last = self._clock(), self._counts.value(ADMITTED_AT)
        if last != self._own and 0 <= now - last < _RELAYED_S:
            self._room_at = None
            return False
        if self._room_at is None:
            self._room_at = now
        own_ms = self._counts.own(OLDEST_MS)
        num_older = sum(0 < other_ms < own_ms for other_ms in self._counts.others(OLDEST_MS))
        return now - self._room_at >= num_older * _LEFT_S

    def see_no_room(self) -> None:
        self._room_at = None

    def take(self) -> None:
        """Note that this gateway sends a request now."""
        self._room_at = None
        self._own = self._clock()
        self._counts.set_value(ADMITTED_AT, self._own)
