"""What one gateway knows that its siblings do not: its requests, and what they add up to.

Made when someone looks, and never otherwise. The gateway that is asked adds up the parts of all (`state`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

import msgspec

from medialane.gateway.operators.decisions import newest_decisions
from medialane.gateway.requests import ItemRecord, RecentRequests, RequestRecord, RequestView
from medialane.gateway.requests.rates import Step, Waits
from medialane.gateway.worker_pool import WorkerPool
from medialane.types.request import WorkerState

#: Over so many seconds are the sums of a part.
WINDOW_S = 60.0
#: Groups by one name that a part has.
MAX_GROUPS = 200
#: Requests or workers that are added up in an iteration of the event loop: about 2 ms.
_PIECES = 200
#: Tenants named for an error or an origin.
_MAX_TENANTS = 8


class Group(msgspec.Struct):
    """Requests that have something in common: a worker, a tenant, the origin of an item. `waits` are what they waited
    for it, `oldest_ms` is the longest wait that has not ended, `prepare_s` what decoding and processing the new items
    took. `tenants` are some of those with items of an origin."""

    requests: int = 0
    failed: int = 0
    live: int = 0
    items: int = 0
    new: int = 0
    oldest_ms: float = 0.0
    prepare_s: float = 0.0
    tenants: set[str] = msgspec.field(default_factory=set)
    waits: Waits = msgspec.field(default_factory=Waits)

    def waiting(self, ms: float) -> None:
        self.oldest_ms = max(self.oldest_ms, ms)

    def add(self, other: Group) -> None:
        self.requests += other.requests
        self.failed += other.failed
        self.live += other.live
        self.items += other.items
        self.new += other.new
        self.oldest_ms = max(self.oldest_ms, other.oldest_ms)
        self.prepare_s += other.prepare_s
        self.tenants |= other.tenants
        self.waits.add(other.waits)

    def of_tenant(self, name: str | None) -> None:
        if name is not None and len(self.tenants) < _MAX_TENANTS:
            self.tenants.add(name)


class LiveStageCount(msgspec.Struct):
    num: int = 0
    oldest_ms: float = 0.0


class ErrorSample(msgspec.Struct, frozen=True):
    """The last request with an error of one code, and some tenants that had it."""

    status: int
    last_at: float
    reason: str
    tenants: tuple[str, ...]
    last_request: str


class WorkerPart(msgspec.Struct, frozen=True):
    state: WorkerState
    in_flight: int


class Part(msgspec.Struct):
    index: str
    pid: int
    started_at: float
    health: str
    problems: tuple[str, ...]
    num_live: int
    stages: dict[str, LiveStageCount]
    live: list[RequestView]
    steps: list[Step]
    items: dict[str, int]
    embeddings: dict[str, int]
    prompt_tokens: int
    cached_tokens: int
    workers: dict[str, WorkerPart]
    by_worker: dict[str, Group]
    by_tenant: dict[str, Group]
    by_origin: dict[str, Group]
    errors: dict[str, ErrorSample]
    decisions: list[dict[str, object]]


class Whose(msgspec.Struct, frozen=True):
    """Which gateway it is, and how it is."""

    index: str
    pid: int
    started_at: float
    health: str = "ok"
    problems: tuple[str, ...] = ()


async def own_part(
    recent: RecentRequests, workers: WorkerPool, whose: Whose, *, num_live: int = 50, num_decisions: int = 20
) -> Part:
    """Return the part of this gateway, with at most so many requests that run and decisions. A thousand requests take
    10 ms: in between, the event loop goes on."""
    sums = _Sums()
    live = recent.live
    for number, record in enumerate(live, 1):
        sums.add_live(record)
        await let_others_run(number)
    for number, record in enumerate(list(recent.ended_within(WINDOW_S)), 1):
        sums.add_ended(record)
        await let_others_run(number)
    await asyncio.sleep(0)
    return Part(
        index=whose.index,
        pid=whose.pid,
        started_at=whose.started_at,
        health=whose.health,
        problems=whose.problems,
        num_live=len(live),
        stages=sums.stages,
        live=[record.view(whose.index) for record in live[:num_live]],
        steps=recent.rates.steps(),
        items=dict(sums.items),
        embeddings=dict(sums.embeddings),
        prompt_tokens=sums.prompt_tokens,
        cached_tokens=sums.cached_tokens,
        workers={
            link.name: WorkerPart(link.state, sum(endpoint.num_in_flight for endpoint in link.endpoints()[:1]))
            for link in workers.links.values()
        },
        by_worker=sums.workers,
        by_tenant=sums.tenants,
        by_origin=sums.origins,
        errors=_samples(recent.errors()),
        decisions=newest_decisions(recent, whose.index, num_decisions),
    )


class _Sums:
    def __init__(self) -> None:
        self.stages: dict[str, LiveStageCount] = {}
        self.items: Counter[str] = Counter()
        self.embeddings: Counter[str] = Counter()
        self.prompt_tokens = self.cached_tokens = 0
        self.workers: dict[str, Group] = {}
        self.tenants: dict[str, Group] = {}
        self.origins: dict[str, Group] = {}

    def add_live(self, record: RequestRecord) -> None:
        stage = self.stages.setdefault(record.stage or "answer", LiveStageCount())
        stage.num += 1
        stage.oldest_ms = max(stage.oldest_ms, round(record.stage_ms, 1))
        if record.worker is not None and (group := _group(self.workers, record.worker)) is not None:
            group.live += 1
            if record.timeline.current == "prefill":
                group.waiting(record.stage_ms)
        if record.tenant is not None and (group := _group(self.tenants, record.tenant)) is not None:
            group.live += 1
            if record.first_token_at is None:
                group.waiting(record.total_ms)
        for item in record.items.values():
            if item.live is not None and (group := _group(self.origins, item.origin)) is not None:
                group.live += 1
                group.of_tenant(record.tenant)
                group.waiting(item.live.current_ms)

    def add_ended(self, record: RequestRecord) -> None:
        self.prompt_tokens += record.prompt_tokens or 0
        self.cached_tokens += record.cached_tokens or 0
        self._add_attempts(record)
        for item in record.items.values():
            self._add_item(item, record)
        if record.tenant is not None and (group := _group(self.tenants, record.tenant)) is not None:
            group.requests += 1
            group.failed += record.is_failed
            group.items += record.num_items
            new = [item.timeline.seconds for item in record.items.values() if item.outcome == "new"]
            group.new += len(new)
            group.prepare_s += sum(seconds.get("decode", 0.0) + seconds.get("process", 0.0) for seconds in new)
            if (ttft_ms := record.ttft_ms) is not None:
                group.waits.count(ttft_ms)

    def _add_attempts(self, record: RequestRecord) -> None:
        for attempt in record.attempts:
            if (group := _group(self.workers, attempt.worker)) is not None:
                group.requests += 1
                group.failed += bool(attempt.error)
        if record.first_token_ms is not None and (group := _group(self.workers, record.worker or "")) is not None:
            group.waits.count(record.first_token_ms)

    def _add_item(self, item: ItemRecord, record: RequestRecord) -> None:
        if item.outcome is not None:
            self.items[item.outcome] += 1
        if item.embedding is not None:
            self.embeddings[item.embedding] += 1
        if (group := _group(self.origins, item.origin)) is None:
            return
        group.items += 1
        group.requests += 1
        group.new += item.outcome == "new"
        group.failed += record.is_failed and item.outcome is None
        group.of_tenant(record.tenant)
        if item.outcome != "hit" and (seconds := item.timeline.seconds.get("fetch")) is not None:
            group.waits.count(seconds * 1000)


async def let_others_run(number: int) -> None:
    """Wait for an iteration of the event loop after so many pieces of work."""
    if number % _PIECES == 0:
        await asyncio.sleep(0)


def _group(groups: dict[str, Group], name: str) -> Group | None:
    """Return the group of this name; None for no name, or if there are too many."""
    if not name or (name not in groups and len(groups) >= MAX_GROUPS):
        return groups.get(name)
    return groups.setdefault(name, Group())


def _samples(failed: Iterable[RequestRecord]) -> dict[str, ErrorSample]:
    """Return the last request of each code; `failed` are the newest first."""
    last: dict[str, RequestRecord] = {}
    tenants: dict[str, dict[str, None]] = {}
    for record in failed:
        if record.error is None:
            continue
        last.setdefault(record.error.code, record)
        named = tenants.setdefault(record.error.code, {})
        if record.tenant is not None and len(named) < _MAX_TENANTS:
            named[record.tenant] = None
    return {
        code: ErrorSample(
            record.status or 0,
            round(record.received_at + record.total_ms / 1000, 3),
            "" if record.error is None else record.error.reason,
            tuple(tenants[code]),
            record.id,
        )
        for code, record in last.items()
    }
