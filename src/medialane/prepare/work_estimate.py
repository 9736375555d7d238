"""How long queued items will keep preparers busy, from what earlier items of their modality took. No I/O."""

from __future__ import annotations

#: Of an item before any was prepared: a photo takes 0.02 to 0.2 s.
INITIAL_S = 0.1
#: Weight of the newest item in the moving average: about the last twenty count.
_NEWEST = 0.1


class WorkEstimate:
    """Moving averages of the time in a preparer, by modality; one that has not occurred counts like all together."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._overall_s = INITIAL_S

    def learn(self, modality: str, seconds: float) -> None:
        """Note that an item kept a preparer busy for `seconds`."""
        known = self._seconds.get(modality, seconds)
        self._overall_s += _NEWEST * (seconds - self._overall_s)
        self._seconds[modality] = known + _NEWEST * (seconds - known)

    def seconds(self, modality: str) -> float:
        """Return the expected time of one item."""
        return self._seconds.get(modality, self._overall_s)
