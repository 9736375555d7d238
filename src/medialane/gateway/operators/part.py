"""What one gateway knows that its siblings do not: its requests, and what they add up to.

Made when someone looks, and never otherwise. The gateway that is asked adds up the parts of all (`state`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import msgspec

from medialane.gateway.records import (
    ItemRecord,
    RateStep,
    RecentRequests,
    RequestFilter,
    RequestRecord,
    RequestView,
    Sums,
    Waits,
    request_view,
    routing_report,
)
from medialane.gateway.workers.pool import WorkerPool
from medialane.types.request import WorkerState

#: Over so many seconds are the sums of a part.
WINDOW_S = 60.0
#: Groups by one name that a part has.
MAX_GROUPS = 200
#: Requests or workers that are added up in an iteration of the event loop: about 2 ms.
_PIECES = 200
#: Tenants named for an error or an origin.
_MAX_TENANTS = 8


class RequestGroup(Sums):
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

    def of_tenant(self, name: str | None) -> None:
        if name is not None and len(self.tenants) < _MAX_TENANTS:
            self.tenants.add(name)


class GatewayView(msgspec.Struct, frozen=True):
    """One gateway of the port. That is `asked` which answers; one that is not `up` has not answered it."""

    index: str
    asked: bool
    up: bool
    pid: int | None = None
    started_at: float | None = None
    live: int | None = None
    health: str | None = None
    problems: tuple[str, ...] = ()


class StageSums(Sums):
    """Requests that run, and wait for the same."""

    num: int = 0
    oldest_ms: float = 0.0


class ErrorGroup(msgspec.Struct, frozen=True):
    """Requests that have failed with one code, the last of them, and some tenants that had it."""

    code: str
    num: int
    status: int | None = None
    last_at: float | None = None
    reason: str = ""
    tenants: tuple[str, ...] = ()
    last_request: str | None = None


class WorkerPart(msgspec.Struct, frozen=True):
    state: WorkerState
    in_flight: int


class Limits(NamedTuple):
    """Most workers, running requests and decisions that are listed."""

    workers: int = 100
    live: int = 50
    decisions: int = 20


class RequestSums(Sums):
    """What the requests of a gateway, or of several, add up to."""

    stages: dict[str, StageSums] = msgspec.field(default_factory=dict)
    items: dict[str, int] = msgspec.field(default_factory=dict)
    embeddings: dict[str, int] = msgspec.field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    by_worker: dict[str, RequestGroup] = msgspec.field(default_factory=dict)
    by_tenant: dict[str, RequestGroup] = msgspec.field(default_factory=dict)
    by_origin: dict[str, RequestGroup] = msgspec.field(default_factory=dict)
    steps: dict[int, RateStep] = msgspec.field(default_factory=dict)

    def add_live(self, record: RequestRecord) -> None:
        stage = record.stage or "answer"
        self.stages[stage] = self.stages.get(stage, StageSums()) + StageSums(1, round(record.stage_ms, 1))
        if record.worker is not None and (group := _group(self.by_worker, record.worker)) is not None:
            group.live += 1
            if record.timeline.current == "prefill":
                group.waiting(record.stage_ms)
        if record.tenant is not None and (group := _group(self.by_tenant, record.tenant)) is not None:
            group.live += 1
            if record.first_token_at is None:
                group.waiting(record.total_ms)
        for item in record.items.values():
            if item.live is not None and (group := _group(self.by_origin, item.origin)) is not None:
                group.live += 1
                group.of_tenant(record.tenant)
                group.waiting(item.live.current_ms)

    def add_ended(self, record: RequestRecord) -> None:
        self.prompt_tokens += record.prompt_tokens or 0
        self.cached_tokens += record.cached_tokens or 0
        self._add_attempts(record)
        for item in record.items.values():
            self._add_item(item, record)
        if record.tenant is not None and (group := _group(self.by_tenant, record.tenant)) is not None:
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
            if (group := _group(self.by_worker, attempt.worker)) is not None:
                group.requests += 1
                group.failed += bool(attempt.error)
        if record.first_token_ms is not None and (group := _group(self.by_worker, record.worker or "")) is not None:
            group.waits.count(record.first_token_ms)

    def _add_item(self, item: ItemRecord, record: RequestRecord) -> None:
        if item.outcome is not None:
            self.items[item.outcome] = self.items.get(item.outcome, 0) + 1
        if item.embedding is not None:
            self.embeddings[item.embedding] = self.embeddings.get(item.embedding, 0) + 1
        if (group := _group(self.by_origin, item.origin)) is None:
            return
        group.items += 1
        group.requests += 1
        group.new += item.outcome == "new"
        group.failed += record.is_failed and item.outcome is None
        group.of_tenant(record.tenant)
        if item.outcome != "hit" and (seconds := item.timeline.seconds.get("fetch")) is not None:
            group.waits.count(seconds * 1000)


class GatewayPart(msgspec.Struct):
    gateway: GatewayView
    sums: RequestSums
    live: list[RequestView]
    workers: dict[str, WorkerPart]
    errors: dict[str, ErrorGroup]
    decisions: list[dict[str, object]]


async def own_part(gateway: GatewayView, recent: RecentRequests, workers: WorkerPool, limits: Limits) -> GatewayPart:
    """Return the part of this gateway. A thousand requests take 10 ms: in between, the event loop goes on."""
    sums = RequestSums()
    live = recent.live
    for number, record in enumerate(live, 1):
        sums.add_live(record)
        await let_others_run(number)
    for number, record in enumerate(list(recent.ended_within(WINDOW_S)), 1):
        sums.add_ended(record)
        await let_others_run(number)
    await asyncio.sleep(0)
    sums.steps = recent.rates.steps()
    return GatewayPart(
        msgspec.structs.replace(gateway, live=len(live)),
        sums,
        live=[request_view(record, gateway.index) for record in live[: limits.live]],
        workers={
            link.name: WorkerPart(link.state, sum(endpoint.num_in_flight for endpoint in link.endpoints()[:1]))
            for link in workers.links.values()
        },
        errors=_errors(sums.steps.values(), recent.errors()),
        decisions=newest_decisions(recent, gateway.index, limits.decisions),
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


async def let_others_run(number: int) -> None:
    """Wait for an iteration of the event loop after so many pieces of work."""
    if number % _PIECES == 0:
        await asyncio.sleep(0)


def _group(groups: dict[str, RequestGroup], name: str) -> RequestGroup | None:
    """Return the group of this name; None for no name, or if there are too many."""
    if not name or (name not in groups and len(groups) >= MAX_GROUPS):
        return groups.get(name)
    return groups.setdefault(name, RequestGroup())


def _errors(steps: Iterable[RateStep], failed: Iterable[RequestRecord]) -> dict[str, ErrorGroup]:
    """Return how often each code was counted, with its last request that is kept; `failed` are the newest first."""
    numbers: Counter[str] = Counter()
    for step in steps:
        numbers.update(step.codes)
    last: dict[str, RequestRecord] = {}
    tenants: dict[str, dict[str, None]] = {}
    for record in failed:
        if record.error is None or record.error.code not in numbers:
            continue
        last.setdefault(record.error.code, record)
        named = tenants.setdefault(record.error.code, {})
        if record.tenant is not None and len(named) < _MAX_TENANTS:
            named[record.tenant] = None
    return {code: _error(code, num, last.get(code), tenants.get(code, ())) for code, num in numbers.items()}


def _error(code: str, num: int, last: RequestRecord | None, tenants: Iterable[str]) -> ErrorGroup:
    if last is None or last.error is None:
        return ErrorGroup(code, num)
    last_at = round(last.received_at + last.total_ms / 1000, 3)
    return ErrorGroup(code, num, last.status or 0, last_at, last.error.reason, tuple(tenants), last.id)
