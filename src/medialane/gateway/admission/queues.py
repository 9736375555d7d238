"""The queues of one gateway: before the preparers, for requests with media that are not cached, and before the engines,
for all. Both are optional."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from medialane.gateway.admission.cost import CostForecast
from medialane.gateway.admission.fair_order import QueuedRequest
from medialane.gateway.admission.queue import AdmissionQueue, QueueLimits, Ticket
from medialane.gateway.admission.shared_counts import PREPARED_MS, PREPARING, SharedCounts
from medialane.types.errors import QueueFull, QueueTimeout
from medialane.types.request import QueuePlace
from medialane.types.stats import QueueStats

if TYPE_CHECKING:
    from medialane.gateway.admission.ttft_limit import NewItem
    from medialane.gateway.config import GatewayConfig
    from medialane.gateway.scope import RequestScope
    from medialane.observability.metrics import Metrics
    from medialane.routing import EngineWork

#: Requests in preparation per preparer: some of them are being fetched, which takes none.
_PER_PREPARER: Final = 4
#: Weight of the newest wait before the engines of a request that was prepared, if it was shorter than the others.
_NEWEST: Final = 0.05
#: What an item is charged while nothing is known of its kind.
_ITEM_MS: Final = 20.0


class Queues:
    """The queues of one gateway. `counts` are those of all gateways of a port; with `has_priorities`, engines are
    scheduled by priority, and the field `priority` of requests counts. `clock` is in seconds."""

    def __init__(
        self,
        config: GatewayConfig,
        forecast: CostForecast,
        metrics: Metrics,
        *,
        counts: SharedCounts | None = None,
        has_priorities: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._forecast = forecast
        self._metrics = metrics
        self._has_priorities = has_priorities
        self._clock = clock
        self._counts = counts = counts or SharedCounts()
        limits = QueueLimits(config.queue_requests, config.queue_bytes, counts)
        self._engines = AdmissionQueue(limits, self._have_engines_room, on_change=self._count, clock=clock)
        #: How long requests wait before the engines, and in them, once they are prepared.
        self._prepared_wait_s = 0.0
        self._preparers = AdmissionQueue(limits, self._have_preparers_room, on_change=self._count, clock=clock)

    def stats(self) -> dict[str, QueueStats]:
        """Return the queues, for /metrics."""
        return {"engine": self._engines.stats(), "preparer": self._preparers.stats()}

    async def engine(self, scope: RequestScope, cost_ms: Callable[[], float], *, has_media: bool) -> Ticket:
        """Wait until the request may be sent to an engine, for which it costs `cost_ms`: that is only asked for if it
        must wait. Raises QueueFull, QueueTimeout, unless its media have been prepared for it."""
        started = self._clock()
        if (ticket := self._engines.enter()) is None:
            may_refuse = not scope.timeline.num_misses
            own_ms = cost_ms()
            request = self._queued(scope, own_ms, own_ms=own_ms, has_media=has_media, may_refuse=may_refuse)
            ticket = await self._admitted(self._engines, request, scope)
        if scope.timeline.num_misses:
            wait_s = self._clock() - started + self._forecast.least_wait_ms() / 1000
            more_s = wait_s - self._prepared_wait_s
            self._prepared_wait_s += more_s * (1 if more_s > 0 else _NEWEST)
        scope.defer(ticket.sent)
        return ticket

    def place(self, ticket: Ticket, work: EngineWork, work_ms: float) -> QueuePlace | None:
        """Return the place of an admitted request in the queue of its worker, which is as long as this gateway knows,
        or has room; None while too little is known of such engines."""
        if ticket.is_overdue:
            return QueuePlace(work_ms, math.inf)
        engine = self._forecast.engine(work.kind)
        if not engine.agreement.is_certain:
            return None
        return QueuePlace(work_ms, max(work.queue_ms, self._config.queue_target_s * 1000 / engine.queue_rate))

    def preparation(self, scope: RequestScope) -> Preparation:
        """Return a request's preparation, which ends with its scope at the latest."""
        preparation = Preparation(self, scope)
        scope.defer(preparation.end)
        return preparation

    def enter_preparers(self) -> Ticket | None:
        return self._preparers.enter()

    async def preparer(self, scope: RequestScope, item: NewItem) -> Ticket:
        """Wait until the request's media may be prepared, of which this is one. Raises QueueFull, QueueTimeout."""
        item_ms = self._forecast.preparing_ms(item.modality, item.num_bytes) or _ITEM_MS
        cost_ms = item_ms * max(1, len(scope.extracted.refs))
        own_ms = item_ms + self._forecast.new_item(item.num_tokens).engine_ms + 1000 * self._prepared_wait_s
        request = self._queued(scope, cost_ms, own_ms=own_ms, has_media=True)
        return await self._admitted(self._preparers, request, scope)

    def _queued(
        self, scope: RequestScope, cost_ms: float, *, own_ms: float, has_media: bool, may_refuse: bool = True
    ) -> QueuedRequest:
        extracted, tenant = scope.extracted, scope.tenant
        priority = extracted.priority if self._has_priorities else 0
        return QueuedRequest(
            tenant="" if tenant is None else tenant.name,
            priority=priority if tenant is None else tenant.priority(priority),
            is_media=has_media,
            cost_ms=cost_ms,
            deadline=self._clock() + self._patience_s(scope, own_ms),
            num_bytes=(extracted.text_bytes or 0) + sum(len(ref.data) for ref in extracted.refs if ref.data),
            may_refuse=may_refuse,
        )

    def _patience_s(self, scope: RequestScope, own_ms: float) -> float:
        """Return how long a request may wait here that then takes `own_ms` itself, and as long as may be queued behind
        this queue, until its first token."""
        config, expectation = self._config, scope.expectation
        if expectation is None or not expectation.limit_ms:
            return config.queue_timeout_s
        left_s = expectation.limit_ms / 1000 - (time.perf_counter() - scope.received_at)
        return min(config.queue_timeout_s, left_s - own_ms / 1000 - config.queue_target_s)

    async def _admitted(self, queue: AdmissionQueue, request: QueuedRequest, scope: RequestScope) -> Ticket:
        timeline = scope.timeline
        before_s = timeline.seconds.get("admission", 0.0)
        try:
            with timeline.measure("admission") as step:
                return await queue.admit(request)
        except (QueueFull, QueueTimeout) as error:
            self._metrics.count_refused(request.tenant, error.code)
            raise
        finally:
            timeline.add("admission", before_s + step.seconds)  # one that was sent back has waited before

    def _have_engines_room(self, unsent_ms: float) -> bool:
        """By the expected wait, as far as it is certain, and by concurrency."""
        forecast = self._forecast
        if forecast.is_full:
            return False
        wait_ms = forecast.least_wait_ms() + unsent_ms / forecast.num_workers
        return wait_ms < self._config.queue_target_s * 1000

    def _have_preparers_room(self, _unsent_ms: float) -> bool:
        total, forecast = self._counts.total, self._forecast
        if total(PREPARING) >= _PER_PREPARER * forecast.num_preparers:
            return False
        # What has been prepared must not pile up before the engines, with the memory that it holds.
        ahead_ms = max(forecast.preparer_wait_ms(), total(PREPARED_MS) / forecast.num_workers)
        return ahead_ms < self._config.queue_target_s * 1000

    def _count(self) -> None:
        """Tell the other gateways what this one has in the preparers, and has got from them."""
        self._counts.set_own(PREPARING, self._preparers.num_unsent)
        self._counts.set_own(PREPARED_MS, round(self._engines.prepared_ms))


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

    async def wait(self, item: NewItem) -> None:
        """Wait until items like this one may be prepared. Raises QueueFull, QueueTimeout."""
        async with self._lock:  # of the other items
            if self._ticket is None:
                self._ticket = await self._queues.preparer(self._scope, item)

    def end(self) -> None:
        """All items are prepared, or will not be. Idempotent."""
        if self._ticket is not None:
            self._ticket.sent()


class MustWait(Exception):
    """An item is not cached, and preparers have no room for it: `Preparation.wait`, and look again."""
