"""The holds of an arena's entries, each with who has taken it (`--debug-holds`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice

from medialane.arena.entries import Entry
from medialane.runtime.tasks import TAKER, call_site
from medialane.types.stats import HoldRecord

#: Frames of the handle's constructor and of `add`.
_OWN_FRAMES = 2


class HoldLog:
    """One per arena, for leases and reservations from their construction to their end."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._taken: dict[int, tuple[Entry, float, str, str]] = {}

    def add(self, handle: object, entry: Entry) -> None:
        self._taken[id(handle)] = entry, self._clock(), TAKER.get(), call_site(_OWN_FRAMES)

    def remove(self, handle: object) -> None:
        self._taken.pop(id(handle), None)

    def records(self, number: int) -> tuple[HoldRecord, ...]:
        """Return the oldest ones."""
        now = self._clock()
        return tuple(
            HoldRecord(
                offset=entry.range.offset,
                size_bytes=entry.size,
                kind=entry.kind,
                key=entry.key or "",
                state=entry.state.value,
                taker=taker,
                call_site=at,
                age_s=now - since,
            )
            for entry, since, taker, at in islice(self._taken.values(), number)
        )
