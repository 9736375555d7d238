"""Requests as operators see them (docs/reference/state.md), and their lines in the log (`--access-log`).

Both are made of the request's record, so they have no prompt, no media, no salt, and of a URL the host. A line is
written once, when the request has ended, whatever ended it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec

from medialane.gateway.records.record import (
    HASH_DIGITS,
    Attempt,
    EmbeddingOutcome,
    ItemOutcome,
    ItemRecord,
    PrefillReport,
    RequestError,
    RequestRecord,
    Source,
)
from medialane.gateway.records.report import RoutingReport, routing_of
from medialane.observability.logging import ACCESS_LOGGER
from medialane.observability.timeline import LiveStep, RequestTimeline, StepName

logger = logging.getLogger(ACCESS_LOGGER)

#: A shorter wait for another request's preparation is not shown.
_LEAST_MS = 0.05
#: Asked for by machines, every few seconds.
_PROBES = frozenset({"/health", "/ping", "/metrics"})
#: Of a path that no route has.
_MAX_PATH_CHARACTERS = 100

_SLOWEST_FIRST: tuple[ItemOutcome, ...] = ("new", "shared", "sent", "hit")
#: Of each item, in a line.
_ITEM_FIELDS = ("modality", "outcome", "embedding", "source", "bytes", "tokens")
_OMITTED: tuple[object, ...] = (None, "", {}, [])


class AttemptView(msgspec.Struct, frozen=True, omit_defaults=True):
    """One worker to which the request was sent; `error` is the code with which that ended, empty if it answered."""

    worker: str
    rank: int = 0
    stage: str = ""
    transport: str = ""
    error: str = ""


class ItemView(msgspec.Struct, frozen=True):
    """One media item, or a document, with the number of its `pages` by outcome (or `pending`); None is unknown, or does
    not apply. `bytes` is the size of its file, `feature_bytes` of what is sent to the worker."""

    param: str
    modality: str
    source: Source
    origin: str | None
    outcome: ItemOutcome | None
    embedding: EmbeddingOutcome | None
    stage: LiveStep | None
    stages_ms: dict[str, float]
    bytes: int | None
    feature_bytes: int | None
    width: int | None
    height: int | None
    frames: int | None
    samples: int | None
    tokens: int | None
    hash: str | None
    pages: dict[str, int] | None = None


class RequestView(msgspec.Struct, frozen=True):
    """A request as operators see it (docs/reference/state.md). `stage` is what it waits for, None once it has ended."""

    id: str
    gateway: str
    received_at: float
    path: str
    model: str | None
    tenant: str | None
    streams: bool | None
    stage: LiveStep | None
    total_ms: float
    ttft_ms: float | None
    stages_ms: dict[str, float]
    num_items: int
    items: tuple[ItemView, ...]
    worker: str | None
    attempts: tuple[AttemptView, ...]
    prompt_tokens: int | None
    cached_tokens: int | None
    generated_tokens: int
    status: int | None
    error: RequestError | None
    decision: RoutingReport | None = None
    prefill: PrefillReport | None = None


def request_view(record: RequestRecord, gateway: str = "0", *, is_full: bool = False) -> RequestView:
    """Return what operators see of a request; if it `is_full`, with the routing decision."""
    return RequestView(
        id=record.id,
        gateway=gateway,
        received_at=round(record.received_at, 3),
        path=record.path,
        model=record.model,
        tenant=record.tenant,
        streams=record.streams,
        stage=record.step,
        total_ms=round(record.total_ms, 1),
        ttft_ms=None if (ttft_ms := record.ttft_ms) is None else round(ttft_ms, 1),
        stages_ms=_steps_of(record),
        num_items=record.num_items,
        items=tuple(_item_views(record)),
        worker=record.worker,
        attempts=tuple(_attempt_view(attempt) for attempt in record.attempts),
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        generated_tokens=record.generated_tokens,
        status=record.status,
        error=record.error,
        decision=routing_of(record) if is_full else None,
        prefill=record.prefill,
    )


def _item_view(item: ItemRecord) -> ItemView:
    return ItemView(
        param=item.param,
        modality=item.modality,
        source=item.source,
        origin=item.origin or None,
        outcome=item.outcome,
        embedding=item.embedding,
        stage=None if item.live is None else item.live.current,
        stages_ms=_steps_ms(item.timeline.seconds, item.live, item.shared_ms),
        bytes=item.num_bytes or None,
        feature_bytes=item.feature_bytes or None,
        width=item.size.width or None,
        height=item.size.height or None,
        frames=item.size.num_frames or None,
        samples=item.size.num_samples or None,
        tokens=item.num_tokens or None,
        hash=item.mm_hash[:HASH_DIGITS] or None,
    )


def _item_views(record: RequestRecord) -> Iterator[ItemView]:
    """Yield the items in their order, a document as one."""
    documents = {id(pages[0]): (param, pages) for param, pages in record.documents.items()}
    for item in record.items.values():
        if item.modality != "document" or not documents:  # a file that is kept has no pages yet
            yield _item_view(item)
        elif id(item) in documents:
            yield _document_view(*documents[id(item)])


def _document_view(param: str, pages: list[ItemRecord]) -> ItemView:
    """Return the sums of a document's pages; its outcome is the one that took longest."""
    views = [_item_view(page) for page in pages]
    outcomes = Counter(view.outcome or "pending" for view in views)
    names = {name for view in views for name in view.stages_ms}
    return msgspec.structs.replace(
        views[0],
        param=param,
        outcome=next((outcome for outcome in _SLOWEST_FIRST if outcome in outcomes), None),
        stage=next((view.stage for view in views if view.stage is not None), None),
        stages_ms={name: max(view.stages_ms.get(name, 0.0) for view in views) for name in sorted(names)},
        feature_bytes=sum(view.feature_bytes or 0 for view in views) or None,
        tokens=sum(view.tokens or 0 for view in views) or None,
        width=None,
        height=None,
        pages=dict(outcomes),
    )


def _attempt_view(attempt: Attempt) -> AttemptView:
    stage, transport = ("", "") if attempt.path is None else (attempt.path.stage.name, attempt.path.transport.name)
    return AttemptView(attempt.worker, attempt.rank, stage, transport, attempt.error)


def _steps_of(record: RequestRecord) -> dict[str, float]:
    live = record.waits_in
    is_own = record.ended_at is not None or live is record.timeline
    return _steps_ms(record.timeline.durations(), None if is_own else live, record.shared_ms)


def _steps_ms(seconds: Mapping[StepName, float], live: RequestTimeline | None, shared_ms: float) -> dict[str, float]:
    """Return the milliseconds of each step; of the current one of `live`, those so far. `shared_ms` are those in which
    another request's preparation was waited for."""
    steps: dict[str, float] = {name: round(s * 1000, 1) for name, s in seconds.items() if name != "first_token"}
    if shared_ms >= _LEAST_MS and not ("decode" in seconds or "process" in seconds):
        steps["prepare"] = round(shared_ms, 1)
    if live is not None:
        steps[live.current] = round(live.current_ms, 1)
    return steps


def log_end(method: str, path: str, record: RequestRecord) -> None:
    """Write the line of a request that has ended. `path` is the client's; its route's path is preferred."""
    view = request_view(record)
    if view.path in _PROBES:
        return
    route = view.path or ascii(path)[1 : _MAX_PATH_CHARACTERS + 1].rstrip("'")
    fields = {"method": method, "path": route, **_fields(view)}
    fields = {name: value for name, value in fields.items() if value not in _OMITTED}
    message = f"{method} {route} {view.status}"
    logger.info("%s", _Text(message, fields), extra={"fields": {"msg": message, **fields}})


def _fields(view: RequestView) -> dict[str, object]:
    error = view.error
    return {
        "status": view.status,
        "error": None if error is None else error.code,
        "reason": None if error is None else error.reason,
        "model": view.model,
        "tenant": view.tenant,
        "stream": view.streams,
        "worker": view.worker,
        "attempts": len(view.attempts) or None,
        "num_items": view.num_items or None,
        "items": [{name: getattr(item, name) for name in _ITEM_FIELDS} for item in view.items],
        "prompt_tokens": view.prompt_tokens,
        "cached_tokens": view.cached_tokens,
        "generated_tokens": view.generated_tokens or None,
        "total_ms": view.total_ms,
        "ttft_ms": view.ttft_ms,
        "stages_ms": view.stages_ms,
    }


class _Text:
    """The message with the fields that it does not have, if the log is text."""

    def __init__(self, message: str, fields: dict[str, object]) -> None:
        self._message = message
        self._fields = fields

    def __str__(self) -> str:
        others = ((name, value) for name, value in self._fields.items() if name not in ("method", "path", "status"))
        return " ".join([self._message, *(f"{name}={_word(value)}" for name, value in others)])


def _word(value: object) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case str():
            return ascii(value) if set(value) & set(" \"'=") or not value.isprintable() else value
        case dict():
            return ",".join(f"{name}:{ms}" for name, ms in value.items())
        case list():
            return ",".join(f"{each['modality']}:{each['outcome'] or 'none'}" for each in value)
        case _:
            return str(value)
