"""What was used for a request's media, told in the answer to those who ask (`"medialane": {"report": true}`).

Theory of operation. An answer is not decoded and encoded again: the report is put into its bytes as they pass.

* *JSON*: before the object's last brace. All but what follows the last brace seen so far is passed on at once, and the
  length is announced only where the answer comes in one piece.
* *A stream of events*: one event more, right before `data: [DONE]`, with no choices and with the identity and usage of
  the chunk before it, since OpenAI's stream helpers take both from the last chunk. A stream that ends without that mark
  (responses, messages) gets an event of its own type at its end.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Literal, Protocol

import msgspec

from medialane.core.feature import StagedItem
from medialane.core.media import MediaSize, Modality
from medialane.core.request import Alternative, RoutingDecision
from medialane.core.stage import StageName, TransportName
from medialane.observability.timeline import StageTimeline

Cache = Literal["hit", "miss", "none"]
Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

_DONE = b"data: [DONE]"

#: What a chunk of a completion says besides its choices.
_OF_THE_CHUNK = ("id", "created", "model", "system_fingerprint", "usage")


class MediaReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was used of one item; what does not apply is left out.

    `cache` says whether its feature was there already, `none` where the worker makes it. `timestamps` are those of the
    sampled frames, in seconds. `num_tokens` are the tokens of the prompt that stand for the item.
    """

    param: str
    modality: Modality
    cache: Cache
    mm_hash: str
    width: int = 0
    height: int = 0
    num_frames: int = 0
    num_samples: int = 0
    timestamps: tuple[float, ...] = ()
    num_tokens: int = 0


class RoutingReport(msgspec.Struct, frozen=True):
    """Where a request was sent, and why. `cached_tokens` are those of the prompt that the router expected in the
    worker's KV cache, `engine_cached_tokens` those that the engine had there (None: it has not said)."""

    worker: str
    rank: int
    reason: str
    num_tokens: int
    cached_tokens: int
    engine_cached_tokens: int | None
    expected_ms: float
    cost_ms: Mapping[str, float]
    alternatives: tuple[Alternative, ...]


class RequestReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was used for a request. `times_ms` are its stages' times, as in the Server-Timing header."""

    items: tuple[MediaReport, ...]
    stage: str | None = None
    transport: str | None = None
    routing: RoutingReport | None = None
    times_ms: Mapping[str, float] = {}
    copied_bytes: int = 0


class Sent(msgspec.Struct, frozen=True):
    """How a request was sent, and where."""

    stage: StageName
    transport: TransportName
    decision: RoutingDecision


def media_report(item: StagedItem, num_tokens: int) -> MediaReport:
    size = item.feature.size
    return MediaReport(
        item.ref.param,
        item.ref.modality,
        "none" if item.is_hit is None else "hit" if item.is_hit else "miss",
        item.feature.mm_hash,
        width=size.width,
        height=size.height,
        num_frames=size.num_frames,
        num_samples=size.num_samples,
        timestamps=timestamps(size),
        num_tokens=num_tokens,
    )


def request_report(
    items: tuple[MediaReport, ...], sent: Sent | None, engine_cached_tokens: int | None, timeline: StageTimeline
) -> bytes:
    """JSON. `sent` is None where the request was sent nowhere."""
    media_sent = sent if items else None  # text has no stage
    return msgspec.json.encode(
        RequestReport(
            items,
            stage=None if media_sent is None else media_sent.stage,
            transport=None if media_sent is None else media_sent.transport,
            routing=None if sent is None else routing_report(sent.decision, engine_cached_tokens),
            times_ms={name: round(seconds * 1000, 2) for name, seconds in timeline.seconds.items()},
            copied_bytes=timeline.copied_bytes,
        )
    )


def routing_report(decision: RoutingDecision, engine_cached_tokens: int | None) -> RoutingReport:
    return RoutingReport(
        worker=decision.worker_id,
        rank=decision.rank,
        reason=decision.reason,
        num_tokens=decision.num_tokens,
        cached_tokens=decision.cached_tokens,
        engine_cached_tokens=engine_cached_tokens,
        expected_ms=round(decision.expected_ms, 3),
        cost_ms={name: round(ms, 3) for name, ms in msgspec.structs.asdict(decision.parts).items() if ms},
        alternatives=decision.alternatives,
    )


def timestamps(size: MediaSize) -> tuple[float, ...]:
    """When the sampled frames of a video are shown, in seconds; empty where its metadata does not tell."""
    if not size.metadata:
        return ()
    found = msgspec.json.decode(size.metadata, type=_Sampled)
    if found.fps is None or found.fps <= 0:
        return ()
    return tuple(round(index / found.fps, 3) for index in found.frames_indices or ())


class _Sampled(msgspec.Struct):
    """The part of vLLM's video metadata that says which frames were taken."""

    fps: float | None = None
    frames_indices: list[int] | None = None


class ReportSender:
    """An ASGI `send` that adds a report to the answer passing through it, if that is one of status 200 in JSON or SSE.

    `report` gives the report's JSON; it is called once, when the answer is about to end.
    """

    def __init__(self, send: Send, report: Callable[[], bytes]) -> None:
        self._send = send
        self._report = report
        self._splice: _Splice | None = None
        self._start: Message | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._splice = _splice_for(message, self._report)
            if self._splice is not None:
                self._start = message
                return
        elif message["type"] == "http.response.body" and self._splice is not None:
            more = message.get("more_body", False)
            message = {**message, "body": self._splice.feed(message.get("body", b""), last=not more)}
            await self._begin(None if more else len(message["body"]))
        await self._send(message)

    async def _begin(self, length: int | None) -> None:
        """Send what begins the answer, its length mended, unless that has been sent."""
        start, self._start = self._start, None
        if start is not None:
            headers = [(k, v) for k, v in start.get("headers", ()) if k.lower() != b"content-length"]
            if length is not None:
                headers.append((b"content-length", str(length).encode()))
            await self._send({**start, "headers": headers})


class _Splice(Protocol):
    def feed(self, piece: bytes, *, last: bool) -> bytes:
        """What to send for `piece` of the body."""
        ...


def _splice_for(start: Message, report: Callable[[], bytes]) -> _Splice | None:
    headers = {k.lower(): v for k, v in start.get("headers", ())}
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if start["status"] != 200 or b"content-encoding" in headers:
        return None
    if kind == b"application/json":
        return JsonSplice(report)
    return StreamSplice(report) if kind == b"text/event-stream" else None


class JsonSplice:
    """Adds the report as a member of the object that the body is. A body that is no object passes as it is."""

    def __init__(self, report: Callable[[], bytes]) -> None:
        self._report = report
        #: From the last brace seen on, and the last character before it.
        self._held = b""
        self._before = b""

    def feed(self, piece: bytes, *, last: bool) -> bytes:
        data = self._held + piece
        brace = data.rfind(b"}")
        if not last:
            cut = len(data) if brace < 0 else brace
            self._held = data[cut:]
            self._before = data[:cut].rstrip()[-1:] or self._before
            return data[:cut]
        if brace < 0 or data[brace + 1 :].strip():
            return data
        comma = b"" if (data[:brace].rstrip()[-1:] or self._before) == b"{" else b","
        return b"".join((data[:brace], comma, b'"medialane":', self._report(), data[brace:]))


class StreamSplice:
    """Adds the report as an event of a stream, of which nothing is held back."""

    def __init__(self, report: Callable[[], bytes]) -> None:
        self._report = report
        self._is_reported = False
        self._at_line_start = True
        self._chunk = b""

    def feed(self, piece: bytes, *, last: bool) -> bytes:
        if self._is_reported:
            return piece
        done = self._find_done(piece)
        if done >= 0:
            self._is_reported = True
            return piece[:done] + self._event(piece[:done] or self._chunk) + piece[done:]
        if piece:
            self._at_line_start = piece.endswith(b"\n")
            self._chunk = piece
        return piece + self._own_event() if last else piece

    def _find_done(self, piece: bytes) -> int:
        """Where the mark of the end begins, or -1. In a string of JSON no line ends, so a model cannot write it."""
        if self._at_line_start and piece.startswith(_DONE):
            return 0
        at = piece.find(b"\n" + _DONE)
        return at + 1 if at >= 0 else -1

    def _event(self, chunk: bytes) -> bytes:
        head = {**_of_the_chunk(chunk), "object": "medialane.report", "choices": []}
        text = json.dumps(head, separators=(",", ":")).encode()
        return b"".join((b"data: ", text[:-1], b',"medialane":', self._report(), b"}\n\n"))

    def _own_event(self) -> bytes:
        event = b'event: medialane.report\ndata: {"type":"medialane.report","medialane":'
        return b"".join((event, self._report(), b"}\n\n"))


def _of_the_chunk(chunk: bytes) -> dict[str, object]:
    """What the last event of `chunk` says besides its choices; nothing where it is no chunk of a completion."""
    _, found, data = chunk.rpartition(b"data: ")
    try:
        document = json.loads(data) if found else None
    except ValueError:
        return {}
    return {k: document[k] for k in _OF_THE_CHUNK if k in document} if isinstance(document, dict) else {}
