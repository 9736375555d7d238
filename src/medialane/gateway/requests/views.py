"""Requests as operators see them (docs/reference/state.md)."""

from __future__ import annotations

from typing import Literal

import msgspec

from medialane.gateway.report import EmbeddingOutcome, RoutingReport
from medialane.observability.timeline import LiveStage

#: Where the client has the item: in the body, at a URL, kept by us, named by a uuid, or processed by the client.
Source = Literal["body", "url", "kept", "uuid", "features"]
#: `hit`: it was cached. `shared`: another request was preparing it. `new`: it was prepared. `sent`: a worker does it.
ItemOutcome = Literal["hit", "shared", "new", "sent"]


class AttemptView(msgspec.Struct, frozen=True, omit_defaults=True):
    """One worker to which the request was sent; `error` is the code with which that ended, empty if it answered."""

    worker: str
    rank: int = 0
    stage: str = ""
    transport: str = ""
    error: str = ""


class ItemView(msgspec.Struct, frozen=True):
    """One media item; None is unknown, or does not apply. `bytes` are those of its file, `feature_bytes` those of what
    is sent to the worker."""

    param: str
    modality: str
    source: Source
    origin: str | None
    outcome: ItemOutcome | None
    embedding: EmbeddingOutcome | None
    stage: LiveStage | None
    stages_ms: dict[str, float]
    bytes: int | None
    feature_bytes: int | None
    width: int | None
    height: int | None
    frames: int | None
    samples: int | None
    tokens: int | None
    hash: str | None


class ErrorView(msgspec.Struct, frozen=True):
    code: str
    reason: str = ""


class RequestView(msgspec.Struct, frozen=True):
    """A request as operators see it (docs/reference/state.md). `stage` is what it waits for, None once it has ended."""

    id: str
    gateway: str
    received_at: float
    path: str
    model: str | None
    tenant: str | None
    streams: bool | None
    stage: LiveStage | None
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
    error: ErrorView | None
    decision: RoutingReport | None = None
