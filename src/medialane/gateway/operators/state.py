"""The state of a server as operators see it (docs/reference/state.md), added up from the parts of its gateways.

A part is what one gateway knows that its siblings do not: its requests, and what they add up to. Parts are made when
someone looks, and never otherwise; the gateway that is asked adds them up.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from typing import Literal

import msgspec

import medialane
from medialane.gateway.records import (
    STEP_S,
    CacheSums,
    ItemRecord,
    RateStep,
    RecentRequests,
    RequestFilter,
    RequestRecord,
    RequestView,
    Series,
    Sums,
    Waits,
    request_view,
    routing_report,
    series,
)
from medialane.gateway.workers.pool import WorkerPool
from medialane.observability.timeline import STEPS, LiveStep
from medialane.store import StoreLink
from medialane.types.request import Endpoint, WorkerRole, WorkerState
from medialane.types.stats import ArenaStats, MediaLeaseStats, PoolStats, ProcessKind

#: In the order in which requests are in them; an item that a preparer has is in `prepare`.
_PLACE = STEPS.index("decode")
LIVE_STEPS: tuple[LiveStep, ...] = (*STEPS[:_PLACE], "prepare", *STEPS[_PLACE:])
#: Seconds over which a part has sums.
WINDOW_S = 60.0
#: Listed workers, running requests, decisions, and groups by tenant or origin.
MAX_WORKERS, MAX_LIVE, MAX_DECISIONS, MAX_GROUPS = 100, 50, 20, 20
#: Groups by one name that a part has.
_MAX_OWN_GROUPS = 200
#: Requests or workers that are added up in an iteration of the event loop: about 2 ms.
_PIECES = 200

Transport = Literal["shm", "pull", "inline"]


class RequestGroup(Sums):
    """Requests that have something in common: a worker, a tenant, the origin of an item. `waits` are what they waited
    for it, `oldest_ms` is the longest wait that has not ended, `prepare_s` what decoding and processing the new items
    took."""

    requests: int = 0
    live: int = 0
    items: int = 0
    new: int = 0
    oldest_ms: float = 0.0
    prepare_s: float = 0.0
    waits: Waits = msgspec.field(default_factory=Waits)

    def waiting(self, ms: float) -> None:
        self.oldest_ms = max(self.oldest_ms, ms)


class StepSums(Sums):
    """Requests that run, and wait for the same."""

    num: int = 0
    oldest_ms: float = 0.0


class RequestSums(Sums):
    """What the requests of a gateway, or of several, add up to."""

    stages: dict[str, StepSums] = msgspec.field(default_factory=dict)
    by_worker: dict[str, RequestGroup] = msgspec.field(default_factory=dict)
    by_tenant: dict[str, RequestGroup] = msgspec.field(default_factory=dict)
    by_origin: dict[str, RequestGroup] = msgspec.field(default_factory=dict)
    steps: dict[int, RateStep] = msgspec.field(default_factory=dict)

    def add_live(self, record: RequestRecord) -> None:
        step = record.step or "answer"
        self.stages[step] = self.stages.get(step, StepSums()) + StepSums(1, round(record.step_ms, 1))
        if (group := _group(self.by_worker, record.worker)) is not None:
            group.live += 1
            if record.timeline.current == "prefill":
                group.waiting(record.step_ms)
        if (group := _group(self.by_tenant, record.tenant)) is not None:
            group.live += 1
            if record.first_token_at is None:
                group.waiting(record.total_ms)
        for item in record.items.values():
            if item.live is not None and (group := _group(self.by_origin, item.origin)) is not None:
                group.live += 1
                group.waiting(item.live.current_ms)

    def add_ended(self, record: RequestRecord) -> None:
        self._add_attempts(record)
        for item in record.items.values():
            self._add_item(item)
        if (group := _group(self.by_tenant, record.tenant)) is not None:
            group.requests += 1
            group.items += record.num_items
            new = [item.timeline.seconds for item in record.items.values() if item.outcome == "new"]
            group.new += len(new)
            group.prepare_s += sum(seconds.get("decode", 0.0) + seconds.get("process", 0.0) for seconds in new)
            if (ttft_ms := record.ttft_ms) is not None:
                group.waits.count(ttft_ms)

    def _add_attempts(self, record: RequestRecord) -> None:
        for attempt in record.attempts:
            if (group := _group(self.by_worker, attempt.worker)) is not None:
                group.requests += 1
        if record.first_token_ms is not None and (group := _group(self.by_worker, record.worker)) is not None:
            group.waits.count(record.first_token_ms)

    def _add_item(self, item: ItemRecord) -> None:
        if (group := _group(self.by_origin, item.origin)) is None:
            return
        group.items += 1
        group.requests += 1
        group.new += item.outcome == "new"
        if item.outcome != "hit" and (seconds := item.timeline.seconds.get("fetch")) is not None:
            group.waits.count(seconds * 1000)


class GatewayView(msgspec.Struct, frozen=True):
    """One gateway of the port; one that is not `up` has not answered."""

    index: str
    up: bool
    pid: int | None = None
    started_at: float | None = None
    live: int | None = None
    health: str | None = None
    problems: tuple[str, ...] = ()


class ErrorGroup(msgspec.Struct, frozen=True):
    """Requests that have failed with one code, and the last of them."""

    code: str
    num: int
    status: int | None = None
    last_at: float | None = None
    reason: str = ""
    last_request: str | None = None


class GatewayPart(msgspec.Struct):
    """What one gateway knows. `in_flight` are its requests at each worker."""

    gateway: GatewayView
    sums: RequestSums
    live: list[RequestView]
    in_flight: dict[str, int]
    errors: dict[str, ErrorGroup]
    decisions: list[dict[str, object]]


async def own_part(gateway: GatewayView, recent: RecentRequests, workers: WorkerPool) -> GatewayPart:
    """Return the part of this gateway. A thousand requests take 10 ms: in between, the event loop goes on."""
    sums = RequestSums()
    live = recent.live
    for number, record in enumerate(live, 1):
        sums.add_live(record)
        await _let_others_run(number)
    for number, record in enumerate(list(recent.ended_within(WINDOW_S)), 1):
        sums.add_ended(record)
        await _let_others_run(number)
    await asyncio.sleep(0)
    sums.steps = recent.rates.steps()
    return GatewayPart(
        msgspec.structs.replace(gateway, live=len(live)),
        sums,
        live=[request_view(record, gateway.index) for record in live[:MAX_LIVE]],
        in_flight={
            link.name: sum(endpoint.num_in_flight for endpoint in link.endpoints()[:1])
            for link in workers.links.values()
        },
        errors=_own_errors(sums.steps.values(), recent.errors()),
        decisions=newest_decisions(recent, gateway.index, MAX_DECISIONS),
    )


def newest_decisions(recent: RecentRequests, gateway: str, number: int) -> list[dict[str, object]]:
    """Return the last routing decisions of this gateway with their reasons, the newest request first."""
    return list(islice(_decisions(recent, gateway), number))


def _decisions(recent: RecentRequests, gateway: str) -> Iterator[dict[str, object]]:
    for record in recent.newest(RequestFilter()):
        for attempt in reversed(record.attempts):
            if (decision := attempt.decision) is not None:
                yield {
                    "request": record.id,
                    "gateway": gateway,
                    "time": round(attempt.chosen_at, 3),
                    "sent": attempt.is_sent,
                    "error": attempt.error,
                    "policy": decision.policy,
                    **msgspec.structs.asdict(routing_report(decision, attempt.engine_cached_tokens)),
                    "first_token_ms": attempt.first_token_ms,
                }


async def _let_others_run(number: int) -> None:
    """Wait for an iteration of the event loop after a number of pieces of work."""
    if number % _PIECES == 0:
        await asyncio.sleep(0)


def _group(groups: dict[str, RequestGroup], name: str | None) -> RequestGroup | None:
    """Return the group of this name; None for no name, or if there are too many."""
    if not name:
        return None
    if name not in groups and len(groups) >= _MAX_OWN_GROUPS:
        return None
    return groups.setdefault(name, RequestGroup())


def _own_errors(steps: Iterable[RateStep], failed: Iterable[RequestRecord]) -> dict[str, ErrorGroup]:
    """Return how often each code was counted, with its last request that is kept; `failed` are the newest first."""
    numbers: Counter[str] = Counter()
    for step in steps:
        numbers.update(step.codes)
    groups = {code: ErrorGroup(code, num) for code, num in numbers.items()}
    for record in failed:
        error = record.error
        if error is None or (group := groups.get(error.code)) is None or group.last_request is not None:
            continue
        last_at = round(record.received_at + record.total_ms / 1000, 3)
        groups[error.code] = ErrorGroup(error.code, group.num, record.status or 0, last_at, error.reason, record.id)
    return groups


class StoreView(msgspec.Struct, frozen=True):
    """The store of the gateways' host as its last statistics have it. `copied` are bytes from other hosts' stores."""

    state: Literal["ready", "starting", "lost"]
    problem: str | None
    arena: ArenaStats | None = None
    preparers: PoolStats | None = None
    kept: MediaLeaseStats | None = None
    copied: Mapping[str, int] = {}
    memory_bytes: Mapping[ProcessKind, int] = {}


class EncoderCacheView(msgspec.Struct, frozen=True):
    used: int
    size: int


class WorkerView(msgspec.Struct, frozen=True):
    name: str
    role: WorkerRole
    state: WorkerState
    running: int
    waiting: int
    in_flight: int
    kv_usage: float
    encoder_cache: EncoderCacheView | None
    transport: Transport | None
    requests: int
    first_token_p50_ms: float | None
    first_token_p95_ms: float | None
    oldest_ms: float | None


class WorkersView(msgspec.Struct, frozen=True):
    num: int
    states: dict[str, int]
    running: int
    waiting: int
    listed: list[WorkerView]


class LiveView(msgspec.Struct, frozen=True):
    """Requests that run, by what they wait for, in the order of LIVE_STEPS."""

    num: int
    stages: dict[str, StepSums]
    listed: list[RequestView]


class GroupView(msgspec.Struct, frozen=True):
    name: str
    requests: int
    live: int
    items: int
    new: int
    p50_ms: float | None
    oldest_ms: float | None
    prepare_ms: float


class ServerState(msgspec.Struct, frozen=True):
    time: float
    version: str
    model: str
    window_s: float
    gateways: list[GatewayView]
    store: StoreView | None
    workers: WorkersView
    encoders: WorkersView
    caches: CacheSums
    live: LiveView
    rates: Series
    errors: list[ErrorGroup]
    tenants: list[GroupView]
    origins: list[GroupView]
    decisions: list[dict[str, object]]


async def whole_state(
    parts: Mapping[str, GatewayPart | None],
    *,
    model: str,
    endpoints: Sequence[Endpoint],
    encoder_caches: Mapping[str, tuple[int, int]],
    store: StoreView | None,
) -> ServerState:
    """Return the state of the server. `parts` are of all gateways of the port, None for one that is down. The
    gateway that is asked sees the rest itself: `endpoints` are its workers, `encoder_caches` how many embeddings each
    has and how many fit, `store` is the one of its host."""
    now = time.time()
    since = (now - WINDOW_S) // STEP_S
    known = [part for part in parts.values() if part is not None]
    sums = RequestSums()
    for part in known:
        sums += part.sums
        await asyncio.sleep(0)
    views = []
    for number, endpoint in enumerate(endpoints, 1):
        views.append(_worker(endpoint, encoder_caches, known, sums.by_worker.get(endpoint.worker_id, RequestGroup())))
        await _let_others_run(number)
    await asyncio.sleep(0)
    return ServerState(
        time=round(now, 3),
        version=medialane.__version__,
        model=model,
        window_s=WINDOW_S,
        gateways=[GatewayView(index, up=False) if part is None else part.gateway for index, part in parts.items()],
        store=store,
        workers=_workers([view for view in views if view.role != "encoder"]),
        encoders=_workers([view for view in views if view.role == "encoder"]),
        caches=sum((step.caches for number, step in sums.steps.items() if number > since), start=CacheSums()),
        live=LiveView(
            sum(part.gateway.live or 0 for part in known),
            {name: sums.stages[name] for name in LIVE_STEPS if name in sums.stages},
            sorted((view for part in known for view in part.live), key=attrgetter("received_at"))[:MAX_LIVE],
        ),
        rates=series(sums.steps, now),
        errors=_errors(known),
        tenants=_groups(sums.by_tenant),
        origins=_groups(sums.by_origin),
        decisions=sorted((each for part in known for each in part.decisions), key=_time, reverse=True)[:MAX_DECISIONS],
    )


def store_view(store: StoreLink) -> StoreView:
    """Return the store as its last statistics have it."""
    status = store.status
    if status is None:
        return StoreView("lost", store.problem)
    stats = status.stats
    return StoreView(
        "ready" if status.has_started else "starting",
        status.problem,
        stats.arena,
        stats.preparers,
        kept=stats.leases,
        copied=stats.pulls.num_bytes,
        memory_bytes=stats.memory,
    )


def _worker(
    endpoint: Endpoint, encoder_caches: Mapping[str, tuple[int, int]], parts: Sequence[GatewayPart], group: RequestGroup
) -> WorkerView:
    name = endpoint.worker_id
    cache = encoder_caches.get(name)
    transport: Transport = "shm" if endpoint.same_host else "pull" if endpoint.can_pull else "inline"
    return WorkerView(
        name=name,
        role=endpoint.role,
        state=endpoint.state,
        running=endpoint.load.num_running,
        waiting=endpoint.load.num_waiting,
        in_flight=sum(part.in_flight.get(name, 0) for part in parts),
        kv_usage=round(endpoint.load.kv_usage, 4),
        encoder_cache=EncoderCacheView(*cache) if cache is not None and cache[1] else None,
        transport=transport if endpoint.ready else None,
        requests=group.requests,
        first_token_p50_ms=group.waits.percentile_ms(0.5),
        first_token_p95_ms=group.waits.percentile_ms(0.95),
        oldest_ms=round(group.oldest_ms, 1) or None,
    )


def _workers(views: Sequence[WorkerView]) -> WorkersView:
    return WorkersView(
        num=len(views),
        states=dict(Counter(view.state for view in views)),
        running=sum(view.running for view in views),
        waiting=sum(view.waiting for view in views),
        listed=sorted(views, key=_attention)[:MAX_WORKERS],
    )


def _attention(view: WorkerView) -> tuple[bool, float, int, int]:
    """Workers that need attention are first; otherwise the order of the configuration stays."""
    return view.state == "ready", -(view.oldest_ms or 0.0), -view.waiting, -view.running


def _errors(parts: Sequence[GatewayPart]) -> list[ErrorGroup]:
    """Return the errors by code, the most frequent first, each with its last request."""
    groups: dict[str, ErrorGroup] = {}
    for part in parts:
        for code, group in part.errors.items():
            known = groups.get(code, group)
            last = known if (known.last_at or 0.0) >= (group.last_at or 0.0) else group
            num = group.num if known is group else known.num + group.num
            groups[code] = msgspec.structs.replace(last, num=num)
    return sorted(groups.values(), key=lambda group: -group.num)


def _groups(groups: Mapping[str, RequestGroup]) -> list[GroupView]:
    first = sorted(groups.items(), key=lambda each: (-(each[1].requests + each[1].new), -each[1].live, each[0]))
    return [
        GroupView(
            name,
            group.requests,
            group.live,
            group.items,
            group.new,
            group.waits.percentile_ms(0.5),
            round(group.oldest_ms, 1) or None,
            round(1000 * group.prepare_s, 1),
        )
        for name, group in first[:MAX_GROUPS]
    ]


def _time(decision: Mapping[str, object]) -> float:
    time_s = decision["time"]
    return time_s if isinstance(time_s, float) else 0.0
