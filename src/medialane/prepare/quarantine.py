"""Items that have ended several preparers, which refuse them for a while.

An item is known by its key in the arena, which covers content, options and salt: one tenant's options refuse nobody
else's use of the same file, and a video that takes too much memory is accepted with fewer frames. A probe is known by
its content alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from cachetools import TTLCache

from medialane.types.errors import PreparerCrashed

logger = logging.getLogger(__name__)

#: Preparers that an item may end. Two are one request's: an item is run again once.
MAX_ENDED = 3

#: Seconds after the last of them for which the item is refused, and most items that are remembered.
QUARANTINE_S = 300.0
MAX_ITEMS = 4096


class Quarantine:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_ended: TTLCache[str, int] = TTLCache(MAX_ITEMS, QUARANTINE_S, clock)

    def check(self, key: str) -> None:
        """Raise PreparerCrashed if the item is refused."""
        if self._num_ended.get(key, 0) >= MAX_ENDED:
            message = f"this item is refused for up to {QUARANTINE_S:g} s: it has crashed or hung {MAX_ENDED} decoders"
            raise PreparerCrashed(message)

    def add(self, key: str) -> None:
        """Count that a preparer died or was killed while it worked on the item."""
        self._num_ended[key] = self._num_ended.get(key, 0) + 1
        if self._num_ended[key] == MAX_ENDED:
            logger.error("item %s is refused for %g s: it has ended %d preparers", key, QUARANTINE_S, MAX_ENDED)

    def clear(self, key: str) -> None:
        """Forget the item, which has been prepared: something else has ended its preparers."""
        self._num_ended.pop(key, None)
