"""Which mover is the fastest for a peer, by the copies that it has made. Pure: durations are passed in.

tcp is the reference: it is used until another mover has proved to be faster. To find out, large entries are copied by
each mover in turn a few times, and now and then later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cachetools import LRUCache

from medialane.core.remote_entry import MoverName

#: Smaller entries take about as long by any mover, so that they are neither measured nor used to measure.
MIN_BYTES = 1 << 20
#: Measurements of each mover before one is chosen. The first one, which includes connecting, does not count.
NUM_SAMPLES = 3
#: Of so many large entries, one is copied by the mover that was measured the longest ago.
REFRESH_INTERVAL = 50
#: How much faster than the reference a mover must be. Measurements vary, and others cost more CPU time.
MIN_GAIN = 1.1
#: Weight of a new measurement.
_WEIGHT = 0.25
#: Pairs of peer and mover that are remembered.
MAX_PAIRS = 4096


class _Measured(NamedTuple):
    num_samples: int = -1
    bytes_per_s: float = 0.0
    num_entries: int = 0
    """large entries copied from the peer since the last one by this mover"""


class MoverSpeed:
    """By peer. A mover that is not used (any more) is not in the `names` that are passed in."""

    def __init__(self) -> None:
        self._measured: LRUCache[tuple[str, MoverName], _Measured] = LRUCache(MAX_PAIRS)

    def order(self, peer: str, names: Sequence[MoverName], num_bytes: int) -> list[MoverName]:
        """Return `names`, whose last one is the reference, the one to try first in front."""
        if len(names) < 2:
            return list(names)
        found = {name: self._measured.get((peer, name), _Measured()) for name in names}
        gain = {names[-1]: MIN_GAIN}
        ranked = sorted(names, key=lambda name: gain.get(name, 1.0) * found[name].bytes_per_s, reverse=True)
        unknown = [name for name in names if found[name].num_samples < NUM_SAMPLES]
        if unknown:
            ranked = [names[-1], *names[:-1]]
        if num_bytes < MIN_BYTES:
            return ranked
        stale = max(names, key=lambda name: found[name].num_entries)
        if unknown:
            first = min(unknown, key=lambda name: found[name].num_samples)
        elif found[stale].num_entries >= REFRESH_INTERVAL:
            first = stale
        else:
            return ranked
        return [first, *(name for name in ranked if name != first)]

    def copied(
        self, peer: str, names: Sequence[MoverName], name: MoverName, *, num_bytes: int, duration_s: float
    ) -> None:
        """Note that `name`, one of the movers `names` that could have been used, has copied an entry."""
        if num_bytes < MIN_BYTES:
            return
        for other in names:
            found = self._measured.get((peer, other), _Measured())
            self._measured[peer, other] = found._replace(num_entries=found.num_entries + 1)
        found = self._measured.get((peer, name), _Measured())
        speed = num_bytes / max(duration_s, 1e-9)
        if found.num_samples > 0:
            speed = _WEIGHT * speed + (1 - _WEIGHT) * found.bytes_per_s
        self._measured[peer, name] = _Measured(found.num_samples + 1, 0.0 if found.num_samples < 0 else speed)
