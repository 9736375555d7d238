"""One recorded request: a line of an OpenAI batch file, and what the gateway has observed of it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from medialane.gateway.requests import RequestView

#: Raised when a reader of older lines would misunderstand newer ones.
FORMAT = 1


class RecordedItem(msgspec.Struct, frozen=True, omit_defaults=True):
    """A media item, and what the gateway did about it."""

    modality: str
    source: str
    outcome: str | None = None
    embedding: str | None = None
    bytes: int | None = None
    tokens: int | None = None


class Observed(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the gateway has observed: `at` is when the request arrived, in seconds since the epoch. `redacted` is what
    was replaced in the body, `media` whether that has the media themselves."""

    at: float
    status: int | None = None
    tenant: str | None = None
    total_ms: float | None = None
    ttft_ms: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    generated_tokens: int = 0
    items: tuple[RecordedItem, ...] = ()
    media: Literal["hash", "whole"] = "hash"
    redacted: str = "none"
    format: int = FORMAT

    @classmethod
    def of(cls, view: RequestView, *, tenant: str | None, media: Literal["hash", "whole"], redacted: str) -> Observed:
        return cls(
            at=view.received_at,
            status=view.status,
            tenant=tenant,
            total_ms=view.total_ms,
            ttft_ms=view.ttft_ms,
            prompt_tokens=view.prompt_tokens,
            cached_tokens=view.cached_tokens,
            generated_tokens=view.generated_tokens,
            items=tuple(
                RecordedItem(item.modality, item.source, item.outcome, item.embedding, item.bytes, item.tokens)
                for item in view.items
            ),
            media=media,
            redacted=redacted,
        )


class RecordedLine(msgspec.Struct, frozen=True, kw_only=True):
    """`body` of a form is its fields, with each file as `file_url`, as in vLLM's batch files."""

    custom_id: str
    method: Literal["POST"] = "POST"
    url: str
    body: dict[str, Any]
    medialane: Observed
