"""Which mover is the fastest for a peer, by the copies that it has made. Pure: durations are passed in.

tcp is the reference: another mover is used where it has proved to be faster. To find out, entries are copied by each
mover in turn: a trial. Only copies of one trial are compared, since the load of hosts and network varies; and trials
are counted, not averaged, since a copy that was interrupted takes many times as long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from cachetools import LRUCache

from medialane.core.remote_entry import MoverName

#: Smaller entries are copied by the reference: starting a copy takes longest of all, and the longer by other movers.
MIN_BYTES = 1 << 20
#: Trials that decide, the latest ones. One before the first of them includes connecting, and does not count.
NUM_TRIALS = 8
#: How many of them a mover must win. One of 0.8 times the reference's speed wins so many by chance in 2 of 1000 cases,
#: if the speed of each copy varies by 30 %.
MIN_WINS = 6
#: How much faster than the reference a mover must be to win a trial. Others cost more CPU time.
MIN_GAIN = 1.1
#: Entries between two trials, and after one that contradicts the choice.
TRIAL_INTERVAL = 50
REPEAT_INTERVAL = 10
#: Sizes within a factor of 4 are one class, up to that of 64 MiB and more.
_NUM_CLASSES = 4
#: Pairs of peer and class of sizes that are remembered.
MAX_CLASSES = 4096


class MoverSpeed:
    """By peer and class of sizes. A mover that is not used (any more) is not in the `names` that are passed in."""

    def __init__(self) -> None:
        self._trials: LRUCache[tuple[str, int], _Trials] = LRUCache(MAX_CLASSES)

    def order(self, peer: str, names: Sequence[MoverName], num_bytes: int) -> list[MoverName]:
        """Return `names`, whose last one is the reference, the one to try first in front."""
        if not names:
            return []
        first = names[-1]
        if len(names) > 1 and num_bytes >= MIN_BYTES:
            first = self._of(peer, num_bytes).first(names)
        return [first, *(name for name in (names[-1], *names[:-1]) if name != first)]

    def copied(
        self, peer: str, names: Sequence[MoverName], name: MoverName, *, num_bytes: int, duration_s: float
    ) -> None:
        """Note that `name`, one of the movers `names` that could have been used, has copied an entry."""
        if num_bytes >= MIN_BYTES:
            self._of(peer, num_bytes).copied(names, name, num_bytes / max(duration_s, 1e-9))

    def _of(self, peer: str, num_bytes: int) -> _Trials:
        size_class = min(_NUM_CLASSES - 1, (num_bytes // MIN_BYTES).bit_length() - 1 >> 1)
        return self._trials.setdefault((peer, size_class), _Trials())


class _Trials:
    """Of one peer and class of sizes."""

    def __init__(self) -> None:
        self._speeds: dict[MoverName, float] = {}
        """of the trial in progress, in bytes/s"""
        self._wins: dict[MoverName, deque[bool]] = {}
        """whether the mover has won, of the latest trials, the oldest first"""
        self._turn = 0
        self._num_trials = -1
        self._num_until_next = 0

    def first(self, names: Sequence[MoverName]) -> MoverName:
        if self._num_until_next:
            return self._choice(names)
        self._turn += 1  # by entry, not by copy: concurrent ones are distributed as well
        return names[(self._turn - 1) % len(names)]

    def copied(self, names: Sequence[MoverName], name: MoverName, speed: float) -> None:
        if self._num_until_next:
            self._num_until_next -= 1
            return
        self._speeds[name] = speed
        if len(names) < 2:
            self._speeds.clear()  # the others are compared with a later copy
        elif self._speeds.keys() >= set(names):
            self._end_trial(names)

    def _end_trial(self, names: Sequence[MoverName]) -> None:
        speeds, self._speeds = self._speeds, {}
        self._num_trials += 1
        if not self._num_trials:
            return
        is_confirmed = True
        chosen, reference = self._choice(names), names[-1]
        for name in names[:-1]:
            has_won = speeds[name] >= MIN_GAIN * speeds[reference]
            self._wins.setdefault(name, deque(maxlen=NUM_TRIALS)).append(has_won)
            is_confirmed &= has_won == (name == chosen)
        if self._num_trials >= NUM_TRIALS:
            self._num_until_next = TRIAL_INTERVAL if is_confirmed else REPEAT_INTERVAL

    def _choice(self, names: Sequence[MoverName]) -> MoverName:
        """Return the mover that has won most, if often enough, or the reference."""
        wins = {name: sum(self._wins.get(name, ())) for name in names[:-1]}
        best = max(wins, key=lambda name: wins[name])
        return best if wins[best] >= MIN_WINS else names[-1]
