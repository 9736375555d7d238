"""The requests of this gateway that live, and the last ones: of all, of the failed, and of the slow.

Theory of operation. Records are kept as they are, and become views only when someone reads them. The last `SIZE` of all
would be seconds under load, so those that failed or were slow are kept longer, each in a ring of its own. `rates`
counts all of them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import takewhile

import msgspec

from medialane.gateway.requests.rates import Rates
from medialane.gateway.requests.record import RequestRecord

#: Kept of all requests.
SIZE = 1000
#: Kept of those that failed, and of the slow ones.
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

    def __init__(self, rates: Rates | None = None) -> None:
        self.rates = rates or Rates()
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
        """Those that have not ended, the oldest first."""
        return list(self._live.values())

    def newest(self, wanted: RequestFilter) -> Iterator[RequestRecord]:
        """Yield what is wanted, newest first: live ones before those that have ended."""
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
        """Return those that have failed, newest first."""
        return reversed(self._failed)

    def ended_within(self, seconds: float) -> Iterator[RequestRecord]:
        """Yield those of the last seconds that are kept, newest first."""
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
