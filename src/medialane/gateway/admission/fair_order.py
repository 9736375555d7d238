"""The order in which waiting requests are served: by priority, then fairly by cost, then by deadline.

Theory of operation. Requests of one priority are shared out by start-time fair queueing (Goyal, Vin, Cheng 1996): each
tenant has a tag, the cost that it has been served so far, in ms. The tenant with the lowest tag is next, and its tag
grows by what its request costs; one that begins to wait starts at the tag that is served now, so that it can neither
save up service nor has to make up for others'. Within a tenant the same is done between requests with media and those
without, so that text does not wait behind media. Among requests of one tenant and kind the earliest deadline is next.

A lower number is more urgent. Every `_FLOOR`-th request served is the one that has waited longest, whatever its
priority, so that none waits for ever. If there are more than may wait, the newest of the least urgent, of the tenant
with most waiting work is dropped: a tenant that floods the queue drops its own requests.

Pure: no clock and no loop.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Final, Generic, TypeVar

#: One of so many requests served is the oldest.
_FLOOR: Final = 16
#: Tags that are kept of those that do not wait, and empty priorities.
_MAX_IDLE: Final = 256

_numbers = count()


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request that waits. `cost_ms` is what it is charged for; `deadline` is on any one clock. One that may not be
    refused is never dropped."""

    tenant: str
    priority: int
    is_media: bool
    cost_ms: float
    deadline: float
    num_bytes: int = 0
    may_refuse: bool = True
    number: int = field(default_factory=_numbers.__next__)


@dataclass(slots=True, eq=False)
class _Flow:
    """Requests of one tenant, priority and kind."""

    waiting: dict[QueuedRequest, None] = field(default_factory=dict)
    by_deadline: list[tuple[float, int, QueuedRequest]] = field(default_factory=list)
    waiting_ms: float = 0.0

    def add(self, request: QueuedRequest) -> None:
        self.waiting[request] = None
        self.waiting_ms += request.cost_ms
        heapq.heappush(self.by_deadline, (request.deadline, request.number, request))

    def remove(self, request: QueuedRequest) -> None:
        del self.waiting[request]
        self.waiting_ms = self.waiting_ms - request.cost_ms if self.waiting else 0.0  # drops the rounding error
        while self.by_deadline and self.by_deadline[0][2] not in self.waiting:
            heapq.heappop(self.by_deadline)

    def first(self) -> QueuedRequest:
        return self.by_deadline[0][2]

    def newest(self) -> QueuedRequest | None:
        """Return the newest that may be refused."""
        return next((request for request in reversed(self.waiting) if request.may_refuse), None)


_Key = TypeVar("_Key", str, bool)
_Child = TypeVar("_Child")


class _Shares(Generic[_Key, _Child]):
    """Children that share service: those with waiting requests, and the tags of others that are ahead."""

    def __init__(self) -> None:
        self.children: dict[_Key, _Child] = {}
        self._tags: dict[_Key, float] = {}
        self._now = 0.0

    def add(self, key: _Key, child: _Child) -> _Child:
        """Add a child that begins to wait."""
        self._tags[key] = max(self._tags.get(key, 0.0), self._now)
        self.children[key] = child
        return child

    def drop(self, key: _Key) -> None:
        """Remove a child that waits no more; its tag is kept while it is ahead of the others'."""
        del self.children[key]
        if len(self._tags) > len(self.children) + _MAX_IDLE:
            self._tags = {k: tag for k, tag in self._tags.items() if k in self.children or tag > self._now}

    def next(self) -> _Key:
        return min(self.children, key=self._tags.__getitem__)

    def charge(self, key: _Key, cost_ms: float) -> None:
        self._now = max(self._now, self._tags[key])
        self._tags[key] += cost_ms

    def refund(self, key: _Key, cost_ms: float) -> None:
        if key in self._tags:
            self._tags[key] -= cost_ms


class _Tenant:
    """The requests of one tenant and priority, by whether they have media."""

    def __init__(self, kinds: _Shares[bool, _Flow]) -> None:
        self.kinds = kinds

    @property
    def waiting_ms(self) -> float:
        return sum(flow.waiting_ms for flow in self.kinds.children.values())


@dataclass(slots=True, eq=False)
class _Band:
    """The requests of one priority. `kinds` are kept while a tenant does not wait, for their tags."""

    tenants: _Shares[str, _Tenant] = field(default_factory=lambda: _Shares[str, _Tenant]())
    kinds: dict[str, _Shares[bool, _Flow]] = field(default_factory=dict)


class FairOrder:
    """The waiting requests."""

    def __init__(self) -> None:
        self._bands: dict[int, _Band] = {}
        #: Oldest first.
        self._waiting: dict[QueuedRequest, None] = {}
        self._num_served = 0
        self.waiting_ms = 0.0
        #: Of those that may not be refused.
        self.prepared_ms = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: QueuedRequest) -> bool:
        return request in self._waiting

    def add(self, request: QueuedRequest) -> None:
        self._waiting[request] = None
        self.waiting_ms += request.cost_ms
        self.prepared_ms += 0.0 if request.may_refuse else request.cost_ms
        band = self._band(request.priority)
        tenant = band.tenants.children.get(request.tenant)
        if tenant is None:
            tenant = band.tenants.add(request.tenant, _Tenant(self._kinds(band, request.tenant)))
        flow = tenant.kinds.children.get(request.is_media)
        if flow is None:
            flow = tenant.kinds.add(request.is_media, _Flow())
        flow.add(request)

    def remove(self, request: QueuedRequest) -> None:
        """Remove a request that waits: it is served, or not any more."""
        del self._waiting[request]
        if not self._waiting:
            self.waiting_ms = self.prepared_ms = 0.0  # drops the rounding errors
        else:
            self.waiting_ms -= request.cost_ms
            self.prepared_ms -= 0.0 if request.may_refuse else request.cost_ms
        tenants = self._bands[request.priority].tenants
        kinds = tenants.children[request.tenant].kinds
        flow = kinds.children[request.is_media]
        flow.remove(request)
        if not flow.waiting:
            kinds.drop(request.is_media)
        if not kinds.children:
            tenants.drop(request.tenant)

    def serve(self) -> QueuedRequest:
        """Remove the next request, and charge its tenant. Raises ValueError if none waits."""
        request = self._next()
        self.take(request)
        return request

    def take(self, request: QueuedRequest) -> None:
        """Remove a request that waits, and charge its tenant."""
        band = self._bands[request.priority]
        band.tenants.charge(request.tenant, request.cost_ms)
        band.tenants.children[request.tenant].kinds.charge(request.is_media, request.cost_ms)
        self.remove(request)

    def refund(self, request: QueuedRequest) -> None:
        """Take back what a request was charged that is about to wait again."""
        band = self._bands.get(request.priority)
        if band is not None:
            band.tenants.refund(request.tenant, request.cost_ms)
            if request.tenant in band.kinds:
                band.kinds[request.tenant].refund(request.is_media, request.cost_ms)

    def drop(self) -> QueuedRequest | None:
        """Remove the request that is dropped if there are too many, if any may be."""
        for priority in sorted(self._busy(), reverse=True):
            tenants = self._bands[priority].tenants.children.values()
            for tenant in sorted(tenants, key=lambda each: -each.waiting_ms):
                for flow in sorted(tenant.kinds.children.values(), key=lambda each: -each.waiting_ms):
                    if (request := flow.newest()) is not None:
                        self.remove(request)
                        return request
        return None

    def ahead_ms(self, request: QueuedRequest) -> float:
        """Return the cost of what is expected to be served before a request that waits, or will: everything more
        urgent, and of each tenant of the same priority as much as of its own."""
        ahead = sum(self._band_ms(priority) for priority in self._busy() if priority < request.priority)
        band = self._bands.get(request.priority)
        if band is None:
            return ahead
        tenants = band.tenants.children
        own = tenants.get(request.tenant)
        flows = own.kinds.children if own is not None else {}
        same = flows[request.is_media].waiting_ms if request.is_media in flows else 0.0
        other = flows[not request.is_media].waiting_ms if (not request.is_media) in flows else 0.0
        mine = same + min(other, same + request.cost_ms)
        others = (tenant.waiting_ms for name, tenant in tenants.items() if name != request.tenant)
        return ahead + mine + sum(min(each, mine + request.cost_ms) for each in others)

    def _next(self) -> QueuedRequest:
        priorities = list(self._busy())
        self._num_served += 1
        if len(priorities) > 1 and self._num_served % _FLOOR == 0:
            return next(iter(self._waiting))
        tenants = self._bands[min(priorities)].tenants
        kinds = tenants.children[tenants.next()].kinds
        return kinds.children[kinds.next()].first()

    def _busy(self) -> Iterator[int]:
        return (priority for priority, band in self._bands.items() if band.tenants.children)

    def _band_ms(self, priority: int) -> float:
        return sum(tenant.waiting_ms for tenant in self._bands[priority].tenants.children.values())

    def _band(self, priority: int) -> _Band:
        """Return the requests of a priority. Clients choose it: of those without requests, few are kept."""
        band = self._bands.get(priority)
        if band is None:
            if len(self._bands) > _MAX_IDLE:
                self._bands = {each: self._bands[each] for each in self._busy()}
            band = self._bands[priority] = _Band()
        return band

    @staticmethod
    def _kinds(band: _Band, tenant: str) -> _Shares[bool, _Flow]:
        if tenant not in band.kinds and len(band.kinds) > _MAX_IDLE + len(band.tenants.children):
            band.kinds = {name: each.kinds for name, each in band.tenants.children.items()}
        return band.kinds.setdefault(tenant, _Shares())
