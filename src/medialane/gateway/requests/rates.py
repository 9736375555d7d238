"""What the requests of the last quarter of an hour add up to, in steps of five seconds.

A step counts times to first token by buckets that double, so that those of several gateways can be added up.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable

import msgspec

from medialane.gateway.requests.record import RequestRecord

STEP_S = 5
NUM_STEPS = 180

#: Upper bounds of the times to first token, in ms; the last bucket has no bound.
BOUNDS_MS = tuple(float(1 << n) for n in range(1, 18))


class Waits(msgspec.Struct):
    """How often each bucket was waited for; empty if never."""

    counts: list[int] = []

    def count(self, ms: float) -> None:
        if not self.counts:
            self.counts = [0] * (len(BOUNDS_MS) + 1)
        self.counts[bisect_left(BOUNDS_MS, ms)] += 1

    def add(self, other: Waits) -> None:
        self.counts = (
            [a + b for a, b in zip(self.counts, other.counts, strict=True)]
            if self.counts and other.counts
            else list(self.counts or other.counts)
        )

    def percentile_ms(self, share: float) -> float | None:
        """Return the time that this share of them did not exceed, interpolated within its bucket; None if there are
        none."""
        wanted, seen = share * sum(self.counts), 0
        for bucket, count in enumerate(self.counts):
            if count and seen + count >= wanted:
                low = BOUNDS_MS[bucket - 1] if bucket else 0.0
                high = BOUNDS_MS[bucket] if bucket < len(BOUNDS_MS) else 2 * low
                return round(low + (high - low) * (wanted - seen) / count, 1)
            seen += count
        return None


class Step(msgspec.Struct):
    """The requests that ended in one step. `number` counts steps since the epoch. `items` are media items, of which
    `items_cached` were cached and `items_shared` made once for several requests. `codes` counts those with an error, by
    its code."""

    number: int
    requests: int = 0
    failed: int = 0
    items: int = 0
    items_cached: int = 0
    items_shared: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    media_bytes: int = 0
    ttft: Waits = msgspec.field(default_factory=Waits)
    codes: dict[str, int] = {}

    def add(self, other: Step) -> None:
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.ttft.add(other.ttft)


_SUMS = tuple(name for name in Step.__struct_fields__ if name not in {"number", "ttft", "codes"})


class Rates:
    """The steps of one gateway, of which only those with requests exist."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._steps: dict[int, Step] = {}  # the oldest first

    def add(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        step = self._current()
        step.requests += 1
        step.failed += record.is_failed
        step.items += record.num_items
        step.prompt_tokens += record.prompt_tokens or 0
        step.cached_tokens += record.cached_tokens or 0
        step.generated_tokens += record.generated_tokens
        for item in record.items.values():
            step.items_cached += item.outcome == "hit"
            step.items_shared += item.outcome == "shared"
            step.media_bytes += item.num_bytes
        if (ttft_ms := record.ttft_ms) is not None:
            step.ttft.count(ttft_ms)
        if record.error is not None:
            step.codes[record.error.code] = step.codes.get(record.error.code, 0) + 1

    def steps(self) -> list[Step]:
        """Return the steps of the last quarter of an hour that have requests, the oldest first."""
        self._forget(int(self._clock()) // STEP_S)
        return list(self._steps.values())

    def _current(self) -> Step:
        number = int(self._clock()) // STEP_S
        step = self._steps.get(number)
        if step is None:
            self._forget(number)
            step = self._steps[number] = Step(number)
        return step

    def _forget(self, number: int) -> None:
        for old in [each for each in self._steps if not number - NUM_STEPS < each <= number]:
            del self._steps[old]


class Series(msgspec.Struct, frozen=True):
    """Rates as operators see them: the values of each step, the oldest first, of which the last has not ended.
    `started_at` is the start of the first one. Percentiles are None without requests."""

    started_at: int
    step_s: int
    values: dict[str, list[float | None]]


def series(steps: Iterable[Step], now: float) -> Series:
    """Add up the steps of several gateways."""
    last = int(now) // STEP_S
    first = last - NUM_STEPS + 1
    summed: dict[int, Step] = {}
    for step in steps:
        if first <= step.number <= last:
            summed.setdefault(step.number, Step(step.number)).add(step)
    none = Step(0)
    in_order = [summed.get(number, none) for number in range(first, last + 1)]
    values: dict[str, list[float | None]] = {name: [getattr(step, name) for step in in_order] for name in _SUMS}
    for name, share in (("ttft_p50_ms", 0.5), ("ttft_p95_ms", 0.95)):
        values[name] = [step.ttft.percentile_ms(share) for step in in_order]
    return Series(first * STEP_S, STEP_S, values)
