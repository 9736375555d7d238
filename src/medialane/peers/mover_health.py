"""Which movers to use for a peer: the best that did not fail lately. Pure: the clock is injected."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from cachetools import LRUCache

from medialane.core.remote_entry import MoverName

#: Consecutive failures after which a mover is avoided. One may be the end of the peer's process.
MAX_FAILURES = 2
#: How long it is avoided at first; each further failure doubles it.
INITIAL_PAUSE_S = 10.0
MAX_PAUSE_S = 600.0
#: Pairs of peer and mover that are remembered.
MAX_PAIRS = 4096


class _Failures(NamedTuple):
    number: int
    until: float


class MoverHealth:
    """`preference` are the movers, best first. The last one is never avoided."""

    def __init__(self, preference: Sequence[MoverName], clock: Callable[[], float] = time.monotonic) -> None:
        self._preference = preference
        self._clock = clock
        self._failures: LRUCache[tuple[str, MoverName], _Failures] = LRUCache(MAX_PAIRS)

    def order(self, peer: str, usable: Collection[str]) -> list[MoverName]:
        """Return the movers to try for `peer`, best first, of those that are `usable` on both sides."""
        names = [name for name in self._preference if name in usable]
        return [name for name in names if name == names[-1] or not self.is_avoided(peer, name)]

    def is_avoided(self, peer: str, name: MoverName) -> bool:
        found = self._failures.get((peer, name))
        return found is not None and found.number >= MAX_FAILURES and self._clock() < found.until

    def failed(self, peer: str, name: MoverName) -> bool:
        """Count a failure. Return True if the mover is avoided from now on, which is worth a warning."""
        was_avoided = self.is_avoided(peer, name)
        found = self._failures.get((peer, name))
        count = 1 if found is None else found.number + 1
        pause_s = min(MAX_PAUSE_S, INITIAL_PAUSE_S * 2.0 ** max(0, min(count, 32) - MAX_FAILURES))
        self._failures[peer, name] = _Failures(count, self._clock() + pause_s)
        return not was_avoided and self.is_avoided(peer, name)

    def succeeded(self, peer: str, name: MoverName) -> None:
        self._failures.pop((peer, name), None)
