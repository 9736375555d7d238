"""What a server replied to one request: what was measured, and what is compared."""

from __future__ import annotations

from typing import Any

import msgspec


class Served(msgspec.Struct, frozen=True, omit_defaults=True):
    """What medialane reports of a request: how each item was found, what became of its embedding, the durations of the
    steps, and the bytes that were copied on the way to the engine."""

    caches: tuple[str, ...] = ()
    embeddings: tuple[str, ...] = ()
    stage: str = ""
    transport: str = ""
    copied_bytes: int = 0
    times_ms: dict[str, float] = {}
    prompt_tokens: int = 0
    cached_tokens: int | None = None

    @classmethod
    def of(cls, report: dict[str, Any]) -> Served:
        items, routing = report.get("items", ()), report.get("routing") or {}
        return cls(
            caches=tuple(item["cache"] for item in items),
            embeddings=tuple(item["embedding"] for item in items if "embedding" in item),
            stage=report.get("stage") or "",
            transport=report.get("transport") or "",
            copied_bytes=report.get("copied_bytes", 0),
            times_ms=report.get("times_ms", {}),
            prompt_tokens=routing.get("num_tokens", 0),
            cached_tokens=routing.get("engine_cached_tokens"),
        )


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """`number` is that of the request. Status 0: there was no whole response, and `error` says why.

    `sent_s` is when it was sent, in seconds of the turn, `late_s` how much later than it should have been. `ttft_s` and
    `tpot_s` (time per output token after the first) are None where nothing was streamed. `token_ids` are those of the
    first choice, `text` is what it says; `document` is an answer that is no text, such as embeddings.
    """

    number: int
    status: int
    sent_s: float
    seconds: float
    late_s: float = 0.0
    ttft_s: float | None = None
    tpot_s: float | None = None
    num_tokens: int = 0
    prompt_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    document: Any = None
    error: str = ""
    served: Served | None = None

    @property
    def succeeded(self) -> bool:
        return self.status == 200
