"""Requests that wait for admission, ordered by priority, fairness between tenants by cost, and deadline.

Theory of operation. An engine serves what it has got in the order of arrival, so whoever is sent there first is served
first: to be fair, a gateway sends no more than keeps the engines busy, and the rest waits here, where it can be
reordered, refused and forgotten. There is a queue for each resource. Requests with media pass the preparers', and, once
prepared, the engines', which no request is refused by that has been prepared; text passes the latter alone.

A queue knows of its resource whether there is room for one more request (`has_room`), given the work that it has
admitted and that the resource has not got yet (`Ticket.sent` ends that). It asks whenever something may have changed,
and every `_TICK_S` while requests wait. A request that its worker has sent back (`Ticket.put_back`), since other
gateways saw the same room, waits again, and nothing is admitted before the next tick. A request that is cancelled or
expires leaves the queue at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from medialane.gateway.admission.fair_order import FairOrder, QueuedRequest
from medialane.gateway.admission.shared_counts import QUEUED_BYTES, QUEUED_REQUESTS, SharedCounts
from medialane.types.errors import QueueFull, QueueTimeout
from medialane.types.retry_after import retry_after
from medialane.types.stats import QueueStats

#: While requests wait. An engine is expected to have work for some tens of ms.
_TICK_S: Final = 0.005
#: Weight that older requests keep in the measured time for a ms of cost: about the last fifty count.
_KEPT: Final = 0.98
#: Cost of any request, ms: none is free.
_LEAST_MS: Final = 0.1
#: Requests that must have been admitted from a queue before a wait is predicted.
_ENOUGH: Final = 20


@dataclass(frozen=True)
class QueueLimits:
    """How many requests may wait in all gateways with these `counts`, and bytes of their bodies."""

    max_requests: int
    max_bytes: int
    counts: SharedCounts = field(default_factory=SharedCounts)

    def are_exceeded(self) -> bool:
        total = self.counts.total
        return total(QUEUED_REQUESTS) > self.max_requests or total(QUEUED_BYTES) > self.max_bytes

    def count(self, num_requests: int, num_bytes: int) -> None:
        """Add to what waits in this gateway."""
        for name, change in ((QUEUED_REQUESTS, num_requests), (QUEUED_BYTES, num_bytes)):
            self.counts.set_own(name, self.counts.own(name) + change)


class Ticket:
    """An admitted request. Its owner calls `sent` once the resource has it, or will not get it; idempotent."""

    __slots__ = ("_cost_ms", "_owner", "_queue", "_request", "is_overdue")

    def __init__(
        self, queue: AdmissionQueue, cost_ms: float, request: QueuedRequest | None = None, *, is_overdue: bool = False
    ) -> None:
        #: Whether it was admitted without room, as it must be served and could wait no longer.
        self.is_overdue = is_overdue
        self._queue: AdmissionQueue | None = queue
        self._owner = queue
        self._cost_ms = cost_ms
        self._request = request

    def sent(self) -> None:
        if self._queue is not None:
            self._queue.has_sent(self._cost_ms)
            self._queue = None

    def put_back(self) -> None:
        """The resource has no room after all: the request is about to wait again. Its tenant is not charged."""
        self._owner.refuse_until_next_tick(self._request)
        self._request = None
        self.sent()


class _Pace:
    """The measured time in which a ms of cost is admitted while requests wait."""

    def __init__(self) -> None:
        self._spent_s = self._admitted_ms = 0.0
        self._num_admitted = 0
        self._last: float | None = None

    def admitted(self, cost_ms: float, now: float) -> None:
        if self._last is not None:
            self._spent_s = self._spent_s * _KEPT + now - self._last
            self._admitted_ms = self._admitted_ms * _KEPT + cost_ms
            self._num_admitted += 1
        self._last = now

    def idle(self) -> None:
        """None waits: what passes until the next is admitted is not spent on requests."""
        self._last = None

    @property
    def is_known(self) -> bool:
        return self._num_admitted >= _ENOUGH

    def seconds(self, cost_ms: float) -> float:
        """Return the expected time for this cost."""
        return cost_ms * self._spent_s / self._admitted_ms if self._admitted_ms else 0.0


class AdmissionQueue:
    """The requests of one gateway that wait for one resource. `has_room` gets the ms of admitted work that the resource
    does not know of; `clock` is that of deadlines, the loop's. `on_change` is called when a request
    enters or leaves."""

    def __init__(
        self,
        limits: QueueLimits,
        has_room: Callable[[float], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._limits = limits
        self._on_change = on_change
        self._not_before = float("-inf")
        self._has_room = has_room
        self._clock = clock
        self._order = FairOrder()
        self._admitted: dict[QueuedRequest, asyncio.Future[Ticket]] = {}
        self._unsent_ms = 0.0
        self._num_unsent = 0
        self._pace = _Pace()
        self._tick: asyncio.TimerHandle | None = None

    @property
    def num_unsent(self) -> int:
        """Tickets that have not ended."""
        return self._num_unsent

    @property
    def prepared_ms(self) -> float:
        """The cost of waiting requests that may not be refused."""
        return self._order.prepared_ms

    @property
    def num_waiting(self) -> int:
        return len(self._order)

    @property
    def waiting_ms(self) -> float:
        """The cost of all waiting requests."""
        return self._order.waiting_ms

    def stats(self) -> QueueStats:
        now = self._clock()
        oldest_s = now - min((request.since for request in self._admitted), default=now)
        return QueueStats(self.num_waiting, self._pace.seconds(self._order.waiting_ms), oldest_s)

    def enter(self) -> Ticket | None:
        """Return the ticket of a request of any cost, which is not charged, if none waits and there is room."""
        if self._order or not self._may_send():
            return None
        return self._ticket(_LEAST_MS)

    async def admit(self, request: QueuedRequest) -> Ticket:
        """Wait until the request is admitted; its deadline is on `clock`. Cancellation leaves nothing behind.

        Raises QueueFull, at once or later, if there are too many requests for all to wait, or the deadline is expected
        to pass; QueueTimeout if it has passed. Neither of a request that may not be refused: it is admitted then.
        """
        request.cost_ms = max(request.cost_ms, _LEAST_MS)
        if not self._order and self._may_send():
            return self._ticket(request.cost_ms)
        if request.may_refuse:
            self._check_deadline(request)
        ticket: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()
        request.since = self._clock()
        self._admitted[request] = ticket
        self._order.add(request)
        self._count(request, 1)
        self.admit_waiting()
        try:
            if request.may_refuse:
                self._drop_surplus()
            # Does not cancel the ticket at the deadline: until this task runs, the request may be admitted or dropped.
            await asyncio.wait((ticket,), timeout=request.deadline - self._clock())
            if ticket.done():
                return ticket.result()
            if not request.may_refuse:
                self._order.take(request)
                self._left(request)
                return self._ticket(request.cost_ms, request, is_overdue=True)
            message = "the request has waited too long for its turn: the server is overloaded"
            raise QueueTimeout(message, retry_after_s=self._retry_after_s())
        except asyncio.CancelledError:
            if ticket.done() and ticket.exception() is None:
                ticket.result().sent()
            raise
        finally:
            if request in self._order:
                self._order.remove(request)
                self._left(request)

    def has_sent(self, cost_ms: float) -> None:
        """The resource has got admitted work, or will not. Called by its ticket."""
        self._num_unsent -= 1
        self._unsent_ms = self._unsent_ms - cost_ms if self._num_unsent else 0.0
        self._on_change()
        self.admit_waiting()

    def refuse_until_next_tick(self, request: QueuedRequest | None) -> None:
        """An admitted request was sent back: what has made the resource's queue longer is about to be known here."""
        self._not_before = self._clock() + _TICK_S
        if request is not None:
            self._order.refund(request)

    def admit_waiting(self) -> None:
        """Admit waiting requests while there is room."""
        order, now = self._order, self._clock()
        while order and self._may_send():
            request = order.serve()
            if order:
                self._pace.admitted(request.cost_ms, now)
            self._left(request).set_result(self._ticket(request.cost_ms, request))
        if not order:
            self._pace.idle()
        elif self._tick is None:
            self._tick = asyncio.get_running_loop().call_later(_TICK_S, self._on_tick)

    def _may_send(self) -> bool:
        return self._clock() >= self._not_before and self._has_room(self._unsent_ms)

    def _on_tick(self) -> None:
        self._tick = None
        self.admit_waiting()

    def _check_deadline(self, request: QueuedRequest) -> None:
        """Refuse a request that would wait longer than it may: its client may ask elsewhere meanwhile."""
        if not self._order or not self._pace.is_known:
            return
        if self._clock() + self._pace.seconds(self._order.ahead_ms(request)) > request.deadline:
            message = "too many requests are waiting for this one to be served in time: the server is overloaded"
            raise QueueFull(message, retry_after_s=self._retry_after_s())

    def _drop_surplus(self) -> None:
        """Refuse requests for the one that has come, if there are too many."""
        while self._limits.are_exceeded() and (request := self._order.drop()) is not None:
            message = "too many requests are waiting: the server is overloaded"
            self._left(request).set_exception(QueueFull(message, retry_after_s=self._retry_after_s()))

    def _ticket(self, cost_ms: float, request: QueuedRequest | None = None, *, is_overdue: bool = False) -> Ticket:
        self._num_unsent += 1
        self._unsent_ms += cost_ms
        self._on_change()
        return Ticket(self, cost_ms, request, is_overdue=is_overdue)

    def _left(self, request: QueuedRequest) -> asyncio.Future[Ticket]:
        """Forget a request that does not wait any more; return what its task waits for."""
        self._count(request, -1)
        return self._admitted.pop(request)

    def _count(self, request: QueuedRequest, change: int) -> None:
        if request.may_refuse:
            self._limits.count(change, change * request.num_bytes)
        self._on_change()

    def _retry_after_s(self) -> int:
        """Return when what waits now is expected to have been admitted."""
        return retry_after(self._pace.seconds(self._order.waiting_ms))
