"""The worker that served a session's last request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

#: worker_id and data-parallel rank: a worker that reconnects gets its sessions back.
WorkerRank = tuple[str, int]


class Sessions:
    """LRU map from session to worker rank: entries expire `ttl_s` after the last request; at most `max_sessions`."""

    def __init__(self, *, ttl_s: float, max_sessions: int, clock: Callable[[], float]) -> None:
        self._ttl_s = ttl_s
        self._max = max_sessions
        self._clock = clock
        self._places: OrderedDict[str, tuple[WorkerRank, float]] = OrderedDict()  # in the order of their last requests

    def __len__(self) -> int:
        return len(self._places)

    def find(self, session_id: str) -> WorkerRank | None:
        """Return the worker that served the session's last request; None if the session is new or expired."""
        found = self._places.get(session_id)
        if found is None or self._clock() - found[1] > self._ttl_s:
            return None
        return found[0]

    def note(self, session_id: str, place: WorkerRank) -> None:
        """Record that the session's request is sent to `place`."""
        now = self._clock()
        self._places[session_id] = (place, now)
        self._places.move_to_end(session_id)
        while len(self._places) > self._max or now - next(iter(self._places.values()))[1] > self._ttl_s:
            self._places.popitem(last=False)
