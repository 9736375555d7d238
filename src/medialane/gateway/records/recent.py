"""The requests of this gateway that live, and the last ones: of all, of the failed, and of the slow.

Theory of operation. Records are kept as they are, and become views only when someone reads them. The last `SIZE` of all
would be seconds under load, so failed and slow ones are kept longer, each in a ring of its own.

`rates` counts all of them, in steps of five seconds of the last quarter of an hour. A step counts times to first token
by buckets that double, so that several gateways' counts can be added up.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import takewhile
from typing import Any, Self, get_args

import msgspec

from medialane.gateway.records.record import EmbeddingOutcome, ItemOutcome, RequestRecord

#: Kept of all requests.
SIZE = 1000
#: Kept of the failed, and of the slow ones.
MARKED_SIZE = 250
#: A request is slow whose first token took longer, in ms.
SLOW_MS = 1000.0


class RequestFilter(msgspec.Struct, frozen=True):
    """Which requests are wanted; empty members want all. `slow_ms` is the least time to the first token, or, without
    one, in all. `model`, `tenant` and `worker` are parts of the names."""

    model: str = ""
    tenant: str = ""
    modality: str = ""
    worker: str = ""
    slow_ms: float | None = None
    failed: bool = False
    live: bool | None = None

    def wants(self, record: RequestRecord) -> bool:
        return (
            _contains(record.model, self.model)
            and _contains(record.tenant, self.tenant)
            and self._wants_items(record)
            and (not self.worker or any(self.worker in each.worker for each in record.attempts))
            and (self.slow_ms is None or waited_ms(record) >= self.slow_ms)
            and (not self.failed or record.error is not None)
            and (self.live is None or self.live == (record.ended_at is None))
        )

    def _wants_items(self, record: RequestRecord) -> bool:
        """Return whether it has items of the modality; `text` is a request without items."""
        if self.modality == "text":
            return not record.num_items
        return not self.modality or any(item.modality == self.modality for item in record.items.values())


class RecentRequests:
    """All requests of a gateway whose clients send a body. One event loop."""

    def __init__(self) -> None:
        self.rates = RequestRates()
        self._live: dict[int, RequestRecord] = {}
        self._last: deque[RequestRecord] = deque(maxlen=SIZE)
        self._failed: deque[RequestRecord] = deque(maxlen=MARKED_SIZE)
        self._slow: deque[RequestRecord] = deque(maxlen=MARKED_SIZE)

    def begin(self, record: RequestRecord) -> None:
        self._live[id(record)] = record

    def end(self, record: RequestRecord, *, is_refused: bool = False) -> None:
        """Keep a request that has ended; not one that was refused: anybody may send any number of those."""
        del self._live[id(record)]
        if is_refused:
            return
        self._last.append(record)
        if record.error is not None:
            self._failed.append(record)
        if waited_ms(record) >= SLOW_MS:
            self._slow.append(record)
        self.rates.add(record)

    @property
    def live(self) -> list[RequestRecord]:
        """Requests that have not ended, the oldest first."""
        return list(self._live.values())

    def newest(self, wanted: RequestFilter) -> Iterator[RequestRecord]:
        """Yield what is wanted, newest first: live ones before ended ones."""
        for record in reversed(self._live.values()):
            if wanted.wants(record):
                yield record
        for record in self._ended(wanted):
            if wanted.wants(record):
                yield record

    def find(self, request_id: str) -> RequestRecord | None:
        """Return the newest request with this id."""
        return next((each for each in self._all() if each.id == request_id), None)

    def errors(self) -> Iterable[RequestRecord]:
        """Return the failed ones, newest first."""
        return reversed(self._failed)

    def ended_within(self, seconds: float) -> Iterator[RequestRecord]:
        """Yield what is kept of the last seconds, newest first."""
        since = time.perf_counter() - seconds
        return takewhile(lambda record: (record.ended_at or 0.0) > since, reversed(self._last))

    def _ended(self, wanted: RequestFilter) -> Iterable[RequestRecord]:
        if wanted.failed:
            return reversed(self._failed)
        if wanted.slow_ms is not None and wanted.slow_ms >= SLOW_MS:
            return reversed(self._slow)
        return reversed(self._last)

    def _all(self) -> Iterator[RequestRecord]:
        yield from reversed(self._live.values())
        for ring in (self._last, self._failed, self._slow):
            yield from reversed(ring)


def waited_ms(record: RequestRecord) -> float:
    """Return the time to the first token; in all, if there was none."""
    ttft_ms = record.ttft_ms
    return record.total_ms if ttft_ms is None else ttft_ms


def _contains(name: str | None, part: str) -> bool:
    return not part or part in (name or "")


STEP_S = 5
NUM_STEPS = 180

#: Upper bounds of the times to first token, in ms; the last bucket has no bound.
BOUNDS_MS = tuple(float(1 << n) for n in range(1, 18))


class Sums(msgspec.Struct):
    """What adds up field by field: numbers, of `oldest_ms` the longest; lists by place, one of them may be empty; dicts
    by key; sets."""

    def __add__(self, other: Self) -> Self:
        fields = ((name, getattr(self, name), getattr(other, name)) for name in self.__struct_fields__)
        return type(self)(**{name: max(a, b) if name == "oldest_ms" else _sum(a, b) for name, a, b in fields})


def _sum(one: Any, other: Any) -> Any:
    match one:
        case int() | float() | Sums():
            return one + other
        case dict():
            return one | {key: _sum(one[key], each) if key in one else each for key, each in other.items()}
        case list():
            return [a + b for a, b in zip(one, other, strict=True)] if one and other else one or other
        case _:
            return one | other


class Waits(Sums):
    """How often each bucket was waited for; empty if never."""

    counts: list[int] = msgspec.field(default_factory=list)

    def count(self, ms: float) -> None:
        if not self.counts:
            self.counts = [0] * (len(BOUNDS_MS) + 1)
        self.counts[bisect_left(BOUNDS_MS, ms)] += 1

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


class CacheSums(Sums):
    """What was found in caches: items and embeddings by outcome, and tokens of prompts."""

    items: dict[ItemOutcome, int] = msgspec.field(default_factory=lambda: dict.fromkeys(get_args(ItemOutcome), 0))
    embeddings: dict[EmbeddingOutcome, int] = msgspec.field(
        default_factory=lambda: dict.fromkeys(get_args(EmbeddingOutcome), 0)
    )
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def add(self, record: RequestRecord) -> None:
        self.prompt_tokens += record.prompt_tokens or 0
        self.cached_tokens += record.cached_tokens or 0
        for item in record.items.values():
            if item.outcome is not None:
                self.items[item.outcome] += 1
            if item.embedding is not None:
                self.embeddings[item.embedding] += 1


class RateStep(Sums):
    """The requests that ended in one step. `codes` counts failed ones by code."""

    requests: int = 0
    failed: int = 0
    generated_tokens: int = 0
    caches: CacheSums = msgspec.field(default_factory=CacheSums)
    ttft: Waits = msgspec.field(default_factory=Waits)
    codes: dict[str, int] = msgspec.field(default_factory=dict)


class RequestRates:
    """The steps of one gateway, by their numbers since the epoch; a step without requests does not exist."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._steps: dict[int, RateStep] = {}  # the oldest first

    def add(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        step = self._current()
        step.requests += 1
        step.failed += record.is_failed
        step.generated_tokens += record.generated_tokens
        step.caches.add(record)
        if (ttft_ms := record.ttft_ms) is not None:
            step.ttft.count(ttft_ms)
        if record.error is not None:
            step.codes[record.error.code] = step.codes.get(record.error.code, 0) + 1

    def steps(self) -> dict[int, RateStep]:
        """Return the steps of the last quarter of an hour that have requests, the oldest first."""
        self._forget(int(self._clock()) // STEP_S)
        return dict(self._steps)

    def _current(self) -> RateStep:
        number = int(self._clock()) // STEP_S
        step = self._steps.get(number)
        if step is None:
            self._forget(number)
            step = self._steps[number] = RateStep()
        return step

    def _forget(self, number: int) -> None:
        for old in [each for each in self._steps if not number - NUM_STEPS < each <= number]:
            del self._steps[old]


class Series(msgspec.Struct, frozen=True):
    """Rates as operators see them: the values of each step, the oldest first; the last one has not ended.
    `started_at` is the start of the first one. Percentiles are None without requests."""

    started_at: int
    step_s: int
    values: dict[str, list[float | None]]


def series(steps: Mapping[int, RateStep], now: float) -> Series:
    """Return the rates of the last quarter of an hour, of the steps of all gateways."""
    last = int(now) // STEP_S
    first = last - NUM_STEPS + 1
    none = RateStep()
    in_order = [steps.get(number, none) for number in range(first, last + 1)]
    values: dict[str, list[float | None]] = {
        "requests": [step.requests for step in in_order],
        "failed": [step.failed for step in in_order],
        "items": [sum(step.caches.items.values()) for step in in_order],
        "items_cached": [step.caches.items["hit"] + step.caches.items["shared"] for step in in_order],
        "prompt_tokens": [step.caches.prompt_tokens for step in in_order],
        "generated_tokens": [step.generated_tokens for step in in_order],
        "ttft_p50_ms": [step.ttft.percentile_ms(0.5) for step in in_order],
        "ttft_p95_ms": [step.ttft.percentile_ms(0.95) for step in in_order],
    }
    return Series(first * STEP_S, STEP_S, values)
