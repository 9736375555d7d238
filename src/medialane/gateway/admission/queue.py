"""Requests that wait for one resource, in an order that is fair to tenants, and that leave it in time.

Theory of operation. An engine serves what it has got in the order of arrival, so whoever is sent there first is served
first: to be fair, a gateway sends no more than keeps the engines busy, and the rest waits here, where it can be
reordered, refused and forgotten. There is a queue for each resource. Requests with media pass the preparers', and, once
prepared, the engines', which no request is refused by that has been prepared; text passes the latter alone.

A queue knows of its resource whether there is room for one more request (`has_room`), given how many it has admitted
that the resource has not got yet (`Ticket.sent` ends that). It asks whenever something may have changed, and every
`TICK_S` while requests wait. A request that is cancelled or expires leaves the queue at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from medialane.gateway.admission.fair_order import FairOrder, QueuedRequest
from medialane.gateway.admission.flow import Resource
from medialane.gateway.admission.shared_counts import QUEUED_BYTES, QUEUED_REQUESTS, SharedCounts
from medialane.types.errors import QueueFull, QueueTimeout
from medialane.types.retry_after import retry_after
from medialane.types.stats import QueueStats

#: While requests wait. An engine has work for some tens of ms, and gateways hear of each other's requests in 1 to 3 ms.
TICK_S: Final = 0.005


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

    __slots__ = ("_queue",)

    def __init__(self, queue: AdmissionQueue) -> None:
        self._queue: AdmissionQueue | None = queue

    def sent(self) -> None:
        if self._queue is not None:
            self._queue.has_sent()
            self._queue = None


class AdmissionQueue:
    """The requests of one gateway that wait for one resource. `has_room` gets how many requests were admitted of which
    the resource does not know; `clock` is that of deadlines, the loop's. `on_change` is called when a request enters or
    leaves."""

    def __init__(
        self,
        resource: Resource,
        limits: QueueLimits,
        has_room: Callable[[int], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._resource = resource
        self._limits = limits
        self._on_change = on_change
        self._has_room = has_room
        self._clock = clock
        self._order = FairOrder()
        self._admitted: dict[QueuedRequest, asyncio.Future[Ticket]] = {}
        self._tick: asyncio.TimerHandle | None = None
        #: Tickets that have not ended.
        self.num_unsent = 0
        #: Waiting requests that may not be refused.
        self.num_prepared = 0

    @property
    def num_waiting(self) -> int:
        return len(self._order)

    def stats(self) -> QueueStats:
        now = self._clock()
        lanes = [flow.lanes[self._resource] for flow in {request.flow for request in self._admitted}]
        expected_s = max([len(lane) * lane.pace_s(now) for lane in lanes], default=0.0)
        return QueueStats(self.num_waiting, expected_s, max([lane.head_s(now) for lane in lanes], default=0.0))

    def enter(self) -> Ticket | None:
        """Return the ticket of a request, which is not charged, if none waits and there is room."""
        return None if self._order or not self._has_room(self.num_unsent) else self._ticket()

    async def admit(self, request: QueuedRequest) -> Ticket:
        """Wait until the request is admitted; its deadline is on `clock`. Cancellation leaves nothing behind.

        Raises QueueFull, at once or later, if there are too many requests for all to wait; QueueTimeout if the deadline
        has passed. Neither of a request that may not be refused: it is admitted then.
        """
        if (entered := self.enter()) is not None:
            return entered
        ticket: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()
        self._admitted[request] = ticket
        self._order.add(request)
        request.flow.lanes[self._resource].add(request, self._clock())
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
                self._left(request, is_served=True)
                return self._ticket()
            message = "the request has waited too long for its turn: the server is overloaded"
            raise QueueTimeout(message, retry_after_s=self._retry_after_s(request))
        except asyncio.CancelledError:
            if ticket.done() and ticket.exception() is None:
                ticket.result().sent()
            raise
        finally:
            if request in self._order:
                self._order.remove(request)
                self._left(request, is_served=False)

    def has_sent(self) -> None:
        """The resource has got an admitted request, or will not. Called by its ticket."""
        self.num_unsent -= 1
        self._on_change()
        self.admit_waiting()

    def admit_waiting(self) -> None:
        """Admit waiting requests while there is room."""
        order = self._order
        while order and self._has_room(self.num_unsent):
            request = order.serve(self._clock())
            self._left(request, is_served=True).set_result(self._ticket())
        if order and self._tick is None:
            self._tick = asyncio.get_running_loop().call_later(TICK_S, self._on_tick)

    def _on_tick(self) -> None:
        self._tick = None
        self.admit_waiting()

    def _drop_surplus(self) -> None:
        """Refuse requests for the one that has come, if there are too many."""
        while self._limits.are_exceeded() and (request := self._order.drop()) is not None:
            error = QueueFull(
                "too many requests are waiting: the server is overloaded", retry_after_s=self._retry_after_s(request)
            )
            self._left(request, is_served=False).set_exception(error)

    def _ticket(self) -> Ticket:
        self.num_unsent += 1
        self._on_change()
        return Ticket(self)

    def _left(self, request: QueuedRequest, *, is_served: bool) -> asyncio.Future[Ticket]:
        """Forget a request that does not wait any more; return what its task waits for."""
        request.flow.lanes[self._resource].leave(request, self._clock(), is_served=is_served)
        self._count(request, -1)
        return self._admitted.pop(request)

    def _count(self, request: QueuedRequest, change: int) -> None:
        if request.may_refuse:
            self._limits.count(change, change * request.num_bytes)
        else:
            self.num_prepared += change
        self._on_change()

    def _retry_after_s(self, request: QueuedRequest) -> int:
        """Return when what waits now before a request like this one is expected to have been admitted."""
        return retry_after(request.flow.wait_s(self._clock()))
