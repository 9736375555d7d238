"""The queues of one gateway: before the preparers, for requests with media that are not cached, and before the engines,
for all; and what they say of a request whose header has arrived.

Theory of operation. An engine serves what it has got in the order of arrival, so whoever is sent there first is served
first: to be fair, a gateway sends no more than keeps the engines busy, and the rest waits here, where it can be
reordered, refused and forgotten. There is a queue for each resource. A request with media waits in the preparers'
queue, then in the engines'; text in the engines' alone. The engines' queue refuses no request whose media are prepared.

Before that, texts take turns: asyncio would take all requests of a burst through parsing, template and tokenizer one
step at a time, and the engine would get the first when nearly all are done.

A queue knows of its resource whether there is room for one more request (`has_room`), given how many it has admitted
that the resource has not got yet (`Ticket.sent` ends that). It asks whenever something may have changed, and every
`TICK_S` while requests wait. A request that is cancelled or expires leaves the queue at once.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from medialane.gateway.admission.fair_order import FairOrder, QueuedRequest
from medialane.gateway.admission.flow import Flow, Refusal, Resource
from medialane.gateway.admission.tenants import (
    PREPARED,
    PREPARING,
    QUEUED_BYTES,
    QUEUED_REQUESTS,
    WAITING,
    SharedCounts,
)
from medialane.types.errors import MedialaneError, QueueFull, QueueTimeout, TtftLimitExceeded, retry_after
from medialane.types.stats import PoolStats, QueueStats

if TYPE_CHECKING:
    from medialane.gateway.config import GatewayConfig
    from medialane.gateway.request.scope import RequestScope
    from medialane.observability.metrics import Metrics
    from medialane.routing import Router

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
    """The requests of one gateway that wait for one resource. `has_room` gets the number of admitted requests of which
    the resource does not know; `clock` is the deadlines' clock, the loop's. `on_change` is called when a request enters
    or leaves."""

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
        expected_s = max([lane.wait_s(now, len(lane) - 1) for lane in lanes], default=0.0)
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


#: A body that is larger has media: its text alone is seldom that large.
MEDIA_BYTES: Final = 64 << 10

#: Requests in preparation per preparer: some of them are being copied or checked, which takes none.
_PER_PREPARER: Final = 4

#: Prepared requests that may wait for an engine, for each engine: they hold memory.
_PREPARED_PER_ENGINE: Final = 2

#: The charge of an item before the preparers, in tokens: about a photo's.
_ITEM_TOKENS: Final = 1024

#: Factor by which tokens of requests with media are charged more than tokens of text: encoders compute them, too.
_MEDIA_CHARGE: Final = 2

#: Of a limit of the time to first token, what is kept free for what the measured times do not say.
_MARGIN: Final = 0.1

#: Number of kept flows without requests: clients choose priorities.
_MAX_IDLE: Final = 1024

#: Of a limit of the time to first token, the least that a request may wait.
_LEAST_WAIT: Final = 0.25

#: Texts on their way to an engine, from the body's arrival: at 32 clients the median of the times to first token was
#: 0.87 of what it is without a limit, with 1 instead of 3 it was 0.89.
_RENDERED_AT_ONCE: Final = 3

#: The longest wait for that, and how long one counts: then it waits for something else, as for an adapter to load.
_RENDERING_S: Final = 0.5


class Queues:
    """The queues of one gateway. `counts` are shared by all gateways of a port; with `has_priorities`, engines are
    scheduled by priority, and the field `priority` of requests counts. `preparers` returns the latest statistics of the
    preparers, None if there are none. `clock` is in seconds."""

    def __init__(
        self,
        config: GatewayConfig,
        router: Router,
        metrics: Metrics,
        *,
        preparers: Callable[[], PoolStats | None] = lambda: None,
        counts: SharedCounts | None = None,
        has_priorities: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._router = router
        self._metrics = metrics
        self._preparers_stats = preparers
        self._has_priorities = has_priorities
        self._clock = clock
        self._flows: dict[tuple[str, bool, int], Flow] = {}
        self._counts = counts = counts or SharedCounts()
        limits = QueueLimits(config.queue_requests, config.queue_bytes, counts)
        self._engines = AdmissionQueue("engine", limits, self._have_engines_room, on_change=self._count, clock=clock)
        self._preparers = AdmissionQueue(
            "preparer", limits, self._have_preparers_room, on_change=self._count, clock=clock
        )
        self._rendering = OldestFirst(lambda: _RENDERED_AT_ONCE)

    def stats(self) -> dict[str, QueueStats]:
        """Return the queues, for /metrics."""
        return {"engine": self._engines.stats(), "preparer": self._preparers.stats()}

    def arrive(self, scope: RequestScope, *, num_bytes: int) -> None:
        """Accept a request by its header, which declares the bytes of its body. Raises QueueFull,
        TtftLimitExceeded. If requests have priorities, which are in bodies, none is refused yet."""
        if not self._has_priorities:
            self._enter(scope, is_media=num_bytes > MEDIA_BYTES)

    def received(self, scope: RequestScope) -> None:
        """Accept a request whose body has arrived: only now it is known whether it has media. Raises QueueFull,
        TtftLimitExceeded."""
        is_media, flow = bool(scope.extracted.refs), scope.flow
        if flow is None or flow.is_media != is_media:
            flow = self._enter(scope, is_media=is_media)
        flow.arrived(scope)

    async def render(self, scope: RequestScope) -> None:
        """Wait until the request, a text, may be rendered. Its turn ends when an engine has it, or when it waits for
        room in one; with its scope at the latest."""
        with nullcontext() if self._rendering.is_free else scope.timeline.measure("admission"):
            scope.end_turn = await self._rendering.take(scope.received_at, within_s=_RENDERING_S)
        scope.defer(scope.end_turn)
        asyncio.get_running_loop().call_later(_RENDERING_S, scope.end_turn)

    def sent(self, scope: RequestScope) -> None:
        """An engine has the request. Idempotent."""
        scope.end_turn()
        if scope.flow is not None:
            scope.flow.sent(scope, self._clock())

    async def engine(self, scope: RequestScope, num_tokens: int, *, has_media: bool) -> Ticket:
        """Wait until the request, a prompt of that many tokens, may be sent to an engine. Raises QueueFull,
        QueueTimeout, unless its media have been prepared for it."""
        if (ticket := self._engines.enter()) is None:
            scope.end_turn()
            may_refuse = not scope.timeline.num_misses
            request = self._queued(scope, num_tokens, has_media=has_media, may_refuse=may_refuse)
            ticket = await self._admitted(self._engines, request, scope)
        scope.defer(ticket.sent)
        return ticket

    def preparation(self, scope: RequestScope) -> Preparation:
        """Return a request's preparation, which ends with its scope at the latest."""
        preparation = Preparation(self, scope)
        scope.defer(preparation.end)
        return preparation

    def enter_preparers(self) -> Ticket | None:
        return self._preparers.enter()

    async def preparer(self, scope: RequestScope) -> Ticket:
        """Wait until the request's media may be prepared. Raises QueueFull, QueueTimeout."""
        request = self._queued(scope, _ITEM_TOKENS * max(1, len(scope.extracted.refs)), has_media=True)
        return await self._admitted(self._preparers, request, scope)

    def _enter(self, scope: RequestScope, *, is_media: bool) -> Flow:
        """Count a request in a flow, in place of the flow chosen by its header."""
        if scope.flow is not None:
            scope.flow.end(scope)
        flow = self._flow(scope, is_media=is_media)
        limit_s = self._limit_s(scope)
        within_s = None if limit_s is None else limit_s * (1 - _MARGIN)
        refusal = flow.accept(scope, self._clock(), self._config.queue_timeout_s, within_s)
        if refusal is not None:
            raise self._refused(flow, refusal, limit_s)
        scope.flow = flow
        scope.defer(lambda: flow.end(scope))
        return flow

    def _refused(self, flow: Flow, refusal: Refusal, limit_s: float | None) -> MedialaneError:
        error: MedialaneError
        retry_after_s = retry_after(refusal.wait_s)
        if refusal.is_late and limit_s is not None:
            message = f"because of the requests that wait, the first token would come later than after {limit_s:g} s"
            error = TtftLimitExceeded(message, retry_after_s=retry_after_s)
        else:
            message = "too many requests are waiting for this one to be served in time: the server is overloaded"
            error = QueueFull(message, retry_after_s=retry_after_s)
        self._metrics.refused_requests.labels(flow.tenant, error.code).inc()
        return error

    def _flow(self, scope: RequestScope, *, is_media: bool) -> Flow:
        tenant = "" if scope.tenant is None else scope.tenant.name
        key = (tenant, is_media, self._priority(scope))
        if (flow := self._flows.get(key)) is None:
            if len(self._flows) > _MAX_IDLE:
                self._flows = {key: each for key, each in self._flows.items() if each.num_in_flight}
            flow = self._flows[key] = Flow(tenant, is_media=is_media)
        return flow

    def _priority(self, scope: RequestScope) -> int:
        priority = scope.extracted.priority if self._has_priorities else 0
        return priority if scope.tenant is None else scope.tenant.priority(priority)

    def _limit_s(self, scope: RequestScope) -> float | None:
        """Return the request's limit of the time to first token."""
        if scope.ttft_limit_ms is not None:
            return scope.ttft_limit_ms / 1000
        return self._config.ttft_limit_s or None

    def _queued(
        self, scope: RequestScope, num_tokens: int, *, has_media: bool, may_refuse: bool = True
    ) -> QueuedRequest:
        extracted = scope.extracted
        flow = scope.flow or self._flow(scope, is_media=has_media)
        return QueuedRequest(
            flow,
            self._priority(scope),
            max(1, num_tokens) * (_MEDIA_CHARGE if has_media else 1),
            deadline=self._clock() + self._patience_s(scope, flow),
            num_bytes=(extracted.text_bytes or 0) + sum(len(ref.data) for ref in extracted.refs if ref.data),
            may_refuse=may_refuse,
        )

    def _patience_s(self, scope: RequestScope, flow: Flow) -> float:
        """Return how long an accepted request may wait here: until its first token will hardly come within its limit,
        since to refuse it late is worse than to answer it a little late."""
        timeout_s, limit_s = self._config.queue_timeout_s, self._limit_s(scope)
        if limit_s is None:
            return timeout_s
        left_s = limit_s - (time.perf_counter() - scope.received_at)
        return min(timeout_s, max(left_s - flow.first_token_s / 2, _LEAST_WAIT * left_s))

    async def _admitted(self, queue: AdmissionQueue, request: QueuedRequest, scope: RequestScope) -> Ticket:
        try:
            with scope.timeline.measure("admission"):
                return await queue.admit(request)
        except (QueueFull, QueueTimeout) as error:
            self._metrics.refused_requests.labels(request.flow.tenant, error.code).inc()
            raise

    def _have_engines_room(self, num_unsent: int) -> bool:
        # Else all gateways would send a request for the same room.
        has_room = self._router.num_with_room > num_unsent
        return has_room and self._counts.is_turn(WAITING, self._clock(), turn_s=TICK_S)

    def _have_preparers_room(self, _num_unsent: int) -> bool:
        stats, total = self._preparers_stats(), self._counts.total
        num_preparers = 1 if stats is None else max(1, stats.num_alive)
        # What has been prepared must not pile up before the engines, with the memory that it holds.
        most_prepared = _PREPARED_PER_ENGINE * max(2, self._router.num_open)
        return total(PREPARING) < _PER_PREPARER * num_preparers and total(PREPARED) < most_prepared

    def _count(self) -> None:
        """Tell the other gateways what this one has in the preparers, and has got from them."""
        self._counts.set_own(PREPARING, self._preparers.num_unsent)
        self._counts.set_own(PREPARED, self._engines.num_prepared)
        self._counts.set_own(WAITING, self._engines.num_waiting)


class Preparation:
    """The preparation of one request's media, from the first item that is not cached to the last."""

    def __init__(self, queues: Queues, scope: RequestScope) -> None:
        self._queues = queues
        self._scope = scope
        self._ticket: Ticket | None = None
        self._lock = asyncio.Lock()

    def begin(self) -> bool:
        """Return whether items may be prepared now; if not, `wait`."""
        if self._ticket is None:
            self._ticket = self._queues.enter_preparers()
        return self._ticket is not None

    async def wait(self) -> None:
        """Wait until items may be prepared. Raises QueueFull, QueueTimeout."""
        async with self._lock:  # of the other items
            if self._ticket is None:
                self._ticket = await self._queues.preparer(self._scope)

    def end(self) -> None:
        """All items are prepared, or will not be. Idempotent."""
        if self._ticket is not None:
            self._ticket.sent()


class MustWait(Exception):
    """An item is not cached, and preparers have no room for it: `Preparation.wait`, and look again."""


class OldestFirst:
    """At most `limit()` turns are taken at a time; the next one goes to whoever has the least `since`. One event
    loop."""

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._num_taken = 0
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    @property
    def is_free(self) -> bool:
        """Whether `take` would return at once."""
        return not self._waiting and self._num_taken < max(1, self._limit())

    async def take(self, since: float, *, within_s: float | None = None) -> Callable[[], None]:
        """Wait for a turn, which is given after `within_s` whatever the limit. Return what ends it; idempotent."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        heapq.heappush(self._waiting, (since, next(self._numbers), turn))
        self._give()
        if not turn.done():
            late = None if within_s is None else loop.call_later(within_s, self._give_to, turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._end()
                raise
            finally:
                if late is not None:
                    late.cancel()
        is_taken = True

        def end() -> None:
            nonlocal is_taken
            if is_taken:
                is_taken = False
                self._end()

        return end

    def _end(self) -> None:
        self._num_taken -= 1
        self._give()

    def _give(self) -> None:
        while self._waiting and (self._num_taken < max(1, self._limit()) or self._waiting[0][2].done()):
            self._give_to(heapq.heappop(self._waiting)[2])

    def _give_to(self, turn: asyncio.Future[None]) -> None:
        if not turn.done():  # given late, or cancelled
            self._num_taken += 1
            turn.set_result(None)
