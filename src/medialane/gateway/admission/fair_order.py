"""The order in which waiting requests are served: by priority, then in turns by tokens, then by deadline.

Theory of operation. Requests of one priority are shared out by deficit round robin (Shreedhar, Varghese 1995): each
tenant in turn is served until what it has been served exceeds its credit, which each turn raises by `_QUANTUM` tokens.
One whose request has cost more owes that; what is left of a turn, or owed, is kept while it does not wait. It then
earns what each of the others is served, up to `_SAVED` tokens, so that a tenant whose few requests leave gaps between
them gets its share, too. One that begins to wait is the next if it has some left (as new flows of RFC 8290): so who
asks now and then does not wait for a turn of all others. Within a tenant the same is done between requests with media
and those without, so that text does not wait behind media. Among requests of one tenant and kind the earliest deadline
is next; if so many wait that the newest could not be served by its deadline, the newest: then some are still served
in time, and not all too late.

A lower number is more urgent. Every `_FLOOR`-th request served is the one that has waited longest, whatever its
priority, so that none waits for ever. If there are more than may wait, the newest of the least urgent, of the tenant
with most waiting work is dropped: a tenant that floods the queue drops its own requests.

Pure: no clock and no loop.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from itertools import count
from typing import Final, Generic, TypeVar

from medialane.gateway.admission.flow import Flow

#: Every n-th request served is the oldest.
_FLOOR: Final = 16
#: Tokens of a turn: about a short text's, so that turns are short.
_QUANTUM: Final = 128
#: The most that one earns while it does not wait: a few requests, by which it may delay others.
_SAVED: Final = 4096
#: Number of kept credits of flows that do not wait, and of empty priorities.
_MAX_IDLE: Final = 256

_numbers = count()


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request that waits; it is charged by its `tokens`. `deadline` is on the queue's clock. One that
    may not be refused is never dropped."""

    flow: Flow
    priority: int
    tokens: int
    deadline: float
    num_bytes: int = 0
    may_refuse: bool = True
    number: int = field(default_factory=_numbers.__next__)


class _Line:
    """Requests of one tenant, priority and kind."""

    def __init__(self) -> None:
        self._waiting: dict[QueuedRequest, None] = {}
        self._by_deadline: list[tuple[float, int, QueuedRequest]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, request: QueuedRequest) -> None:
        self._waiting[request] = None
        heapq.heappush(self._by_deadline, (request.deadline, request.number, request))

    def remove(self, request: QueuedRequest) -> None:
        del self._waiting[request]
        while self._by_deadline and self._by_deadline[0][2] not in self._waiting:
            heapq.heappop(self._by_deadline)

    def next(self, now: float) -> QueuedRequest:
        newest = next(reversed(self._waiting))
        if now + len(self._waiting) * newest.flow.pace_s() > newest.deadline:
            return newest
        return self._by_deadline[0][2]


_Key = TypeVar("_Key", str, bool)
_Child = TypeVar("_Child", "_Line", "_Tenant")


class _Turns(Generic[_Key, _Child]):
    """Children with waiting requests, the next one first, and the tokens that they, and some others, have left of their
    turn."""

    def __init__(self) -> None:
        self.children: OrderedDict[_Key, _Child] = OrderedDict()
        self._credit: dict[_Key, float] = {}
        #: Tokens that a child has been served that always waited, and those when a child ceased to wait.
        self._served = 0.0
        self._left_at: dict[_Key, float] = {}

    def __bool__(self) -> bool:
        return bool(self.children)

    def add(self, key: _Key, child: _Child) -> _Child:
        """Add a child that begins to wait."""
        credit = self._credit.setdefault(key, _QUANTUM)
        earned = self._served - self._left_at.pop(key, self._served)
        self._credit[key] = max(credit, min(credit + earned, _SAVED))
        self.children[key] = child
        self.children.move_to_end(key, last=False)
        return child

    def drop(self, key: _Key) -> None:
        """Remove a child that does not wait any more."""
        del self.children[key]
        self._left_at[key] = self._served
        if len(self._left_at) > _MAX_IDLE:
            del self._left_at[key], self._credit[key]

    def first(self) -> _Key:
        while self._credit[key := next(iter(self.children))] <= 0:
            self._credit[key] += _QUANTUM
            self.children.move_to_end(key)
        return key

    def next(self, now: float) -> QueuedRequest:
        return self.children[self.first()].next(now)

    def pay(self, key: _Key, tokens: int) -> None:
        self._credit[key] -= tokens
        self._served += tokens / len(self.children)


class _Tenant(_Turns[bool, _Line]):
    """The requests of one tenant and priority, by whether they have media."""

    def charge(self, request: QueuedRequest) -> None:
        self.pay(request.flow.is_media, request.tokens)


class _Band(_Turns[str, _Tenant]):
    """The requests of one priority, by tenant."""

    def charge(self, request: QueuedRequest) -> None:
        self.pay(request.flow.tenant, request.tokens)
        self.children[request.flow.tenant].charge(request)


class FairOrder:
    """The waiting requests. `now` is on the clock of deadlines."""

    def __init__(self) -> None:
        self._bands: dict[int, _Band] = {}
        #: Oldest first.
        self._waiting: dict[QueuedRequest, None] = {}
        self._num_served = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: QueuedRequest) -> bool:
        return request in self._waiting

    def add(self, request: QueuedRequest) -> None:
        self._waiting[request] = None
        band = self._bands.setdefault(request.priority, _Band())
        name, is_media = request.flow.tenant, request.flow.is_media
        tenant = band.children.get(name) or band.add(name, _Tenant())
        (tenant.children.get(is_media) or tenant.add(is_media, _Line())).add(request)

    def remove(self, request: QueuedRequest) -> None:
        """Remove a request that waits: it is served, or not any more."""
        del self._waiting[request]
        band = self._bands[request.priority]
        tenant = band.children[request.flow.tenant]
        line = tenant.children[request.flow.is_media]
        line.remove(request)
        if not line:
            tenant.drop(request.flow.is_media)
        if not tenant:
            band.drop(request.flow.tenant)
        if not band and len(self._bands) > _MAX_IDLE:  # clients choose priorities
            del self._bands[request.priority]

    def serve(self, now: float) -> QueuedRequest:
        """Remove the next request, and charge its tenant. Raises ValueError if none waits."""
        busy = [priority for priority, band in self._bands.items() if band]
        self._num_served += 1
        band = self._bands[min(busy)]
        is_oldest = len(busy) > 1 and self._num_served % _FLOOR == 0
        request = next(iter(self._waiting)) if is_oldest else band.next(now)
        self.take(request)
        return request

    def take(self, request: QueuedRequest) -> None:
        """Remove a request that waits, and charge its tenant."""
        self._bands[request.priority].charge(request)
        self.remove(request)

    def drop(self) -> QueuedRequest | None:
        """Remove the request that is dropped if there are too many, if any may be."""
        refusable = [request for request in self._waiting if request.may_refuse]
        if not refusable:
            return None
        least = max(request.priority for request in refusable)
        refusable = [request for request in refusable if request.priority == least]
        tokens: Counter[tuple[str, bool]] = Counter()
        tenants: Counter[str] = Counter()
        for request in refusable:
            tokens[request.flow.tenant, request.flow.is_media] += request.tokens
            tenants[request.flow.tenant] += request.tokens
        (tenant, _), *_ = tenants.most_common(1)
        is_media = tokens[tenant, True] > tokens[tenant, False]
        newest = next(r for r in reversed(refusable) if (r.flow.tenant, r.flow.is_media) == (tenant, is_media))
        self.remove(newest)
        return newest
