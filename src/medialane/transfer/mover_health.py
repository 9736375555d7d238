"""For which peers a mover is avoided because it failed lately. Pure: the clock is injected."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from cachetools import LRUCache

#: Consecutive failures after which the mover is avoided. One may be the end of the peer's process.
MAX_FAILURES = 2
#: How long it is avoided at first; each further failure doubles it.
INITIAL_PAUSE_S = 10.0
MAX_PAUSE_S = 600.0
#: Peers that are remembered.
MAX_PEERS = 4096


class _Failures(NamedTuple):
    number: int
    until: float


class MoverHealth:
    """Of one mover, by the address of the peer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: LRUCache[str, _Failures] = LRUCache(MAX_PEERS)

    def is_avoided(self, peer: str) -> bool:
        failures = self._failures.get(peer)
        return failures is not None and failures.number >= MAX_FAILURES and self._clock() < failures.until

    def failed(self, peer: str) -> bool:
        """Count a failure. Return True if the mover is avoided from now on, which is worth a warning."""
        was_avoided = self.is_avoided(peer)
        earlier = self._failures.get(peer)
        number = 1 if earlier is None else earlier.number + 1
        pause_s = min(MAX_PAUSE_S, INITIAL_PAUSE_S * 2.0 ** max(0, min(number, 32) - MAX_FAILURES))
        self._failures[peer] = _Failures(number, self._clock() + pause_s)
        return not was_avoided and self.is_avoided(peer)

    def succeeded(self, peer: str) -> None:
        self._failures.pop(peer, None)
