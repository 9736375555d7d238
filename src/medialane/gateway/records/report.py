"""The report on a request's media and routing, added to the response on request: by the header `X-Medialane-Report:
true`, or by `"medialane": {"report": true}` in the body. docs/report.schema.json describes it.

Theory of operation. The response is not decoded and re-encoded: the report is spliced into its bytes as they pass.

* *JSON*: before the object's last brace. Only the bytes from the last brace seen so far are held back, and
  Content-Length is set only if the response is a single chunk.
* *Server-sent events*: one more event right before `data: [DONE]`, without choices and with the identity and usage of
  the previous chunk, since OpenAI's stream helpers read both from the last chunk. A stream that ends without that
  marker (responses, messages) ends with an event of type `medialane.report`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import msgspec

from medialane.gateway.records.record import EmbeddingOutcome, ItemRecord, PrefillReport, RequestRecord
from medialane.types.feature import MoverName
from medialane.types.media import MediaSize, MediaSource, StageName
from medialane.types.request import Alternative, RoutingDecision

if TYPE_CHECKING:  # types only: starlette is installed with vLLM
    from starlette.types import Message, Send

_DONE = b"data: [DONE]"

#: Members of a completion chunk besides its choices.
_CHUNK_MEMBERS = ("id", "created", "model", "system_fingerprint", "usage")


Cache = Literal["hit", "miss", "none"]
_CACHES: dict[str, Cache] = {"hit": "hit", "shared": "miss", "new": "miss", "sent": "none"}


class MediaReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was used of one item, or of one page of a document; members that do not apply are omitted.

    `cache` is whether its feature was cached, `none` if the worker computes it. `timestamps` are the times
    of the sampled frames, in seconds. `num_tokens` is the number of prompt tokens that represent the item. `embedding`
    is what the worker did about the item's embedding, if it keeps embeddings.
    """

    param: str
    modality: MediaSource
    cache: Cache
    mm_hash: str
    width: int = 0
    height: int = 0
    num_frames: int = 0
    num_samples: int = 0
    timestamps: tuple[float, ...] = ()
    num_tokens: int = 0
    embedding: EmbeddingOutcome | None = None


class DocumentReport(msgspec.Struct, frozen=True):
    """The pages of a document that are among the items, of which `num_hits` were cached: their tokens, and the time in
    which all were found or made."""

    param: str
    num_pages: int
    num_hits: int
    num_tokens: int
    ms: float


class RoutingReport(msgspec.Struct, frozen=True):
    """Where a request was sent, and why. `cached_tokens` is the number of prompt tokens predicted to be in the worker's
    KV cache, `engine_cached_tokens` the number that the engine reported (null: not reported). Of the items,
    `encoder_items_cached` need neither encoder nor embedding, `encoder_items_loaded` have one to load. `alternatives`
    are the next best workers."""

    worker: str
    rank: int
    reason: str
    num_tokens: int
    cached_tokens: int
    engine_cached_tokens: int | None
    encoder_items_cached: int
    encoder_items_loaded: int
    expected_ms: float
    cost_ms: dict[str, float]
    alternatives: tuple[Alternative, ...]


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was used for a request, so far; members that do not apply are omitted. `routing` is missing if it was not
    sent to a worker. `times_ms` are the durations of its steps, as in the Server-Timing header."""

    items: tuple[MediaReport, ...]
    request_id: str = ""
    stage: StageName | None = None
    transport: str | None = None
    movers: tuple[MoverName, ...] = ()
    routing: RoutingReport | None = None
    times_ms: dict[str, float] = {}
    copied_bytes: int = 0
    documents: tuple[DocumentReport, ...] = ()
    prefill: PrefillReport | None = None


def request_report(record: RequestRecord) -> bytes:
    """Return the report on a request so far as JSON, with the items that are prepared, in the order of the request."""
    sent = record.sent
    path = None if sent is None else sent.path
    report = Report(
        tuple(_media_report(item, _CACHES[item.outcome]) for item in record.items.values() if item.outcome is not None),
        record.id,
        stage=None if path is None else path.stage.name,
        transport=None if path is None else path.transport.name,
        movers=() if path is None or sent is None else sent.movers,
        routing=routing_of(record),
        times_ms={name: round(seconds * 1000, 2) for name, seconds in record.timeline.durations().items()},
        copied_bytes=record.timeline.copied_bytes,
        documents=tuple(_document_report(param, pages) for param, pages in record.documents.items()),
        prefill=record.prefill,
    )
    return msgspec.json.encode(report)


def _media_report(item: ItemRecord, cache: Cache) -> MediaReport:
    size = item.size
    return MediaReport(
        item.param,
        item.modality,
        cache,
        item.mm_hash,
        width=size.width,
        height=size.height,
        num_frames=size.num_frames,
        num_samples=size.num_samples,
        timestamps=_timestamps(size),
        num_tokens=item.num_tokens,
        embedding=item.embedding,
    )


def _document_report(param: str, pages: list[ItemRecord]) -> DocumentReport:
    known = [page for page in pages if page.outcome is not None]
    seconds = max((p.ended_at for p in known), default=0.0) - min((p.started_at for p in known), default=0.0)
    num_hits = sum(page.outcome == "hit" for page in known)
    return DocumentReport(param, len(known), num_hits, sum(p.num_tokens for p in known), round(seconds * 1000, 2))


def _timestamps(size: MediaSize) -> tuple[float, ...]:
    """Return the timestamps of a video's sampled frames in seconds; empty if its metadata does not have them."""
    if not size.metadata:
        return ()
    metadata = msgspec.json.decode(size.metadata, type=_SampledFrames)
    if metadata.fps is None or metadata.fps <= 0:
        return ()
    return tuple(round(index / metadata.fps, 3) for index in metadata.frames_indices or ())


class _SampledFrames(msgspec.Struct):
    """The members of vLLM's video metadata that identify the sampled frames."""

    fps: float | None = None
    frames_indices: list[int] | None = None


def routing_of(record: RequestRecord) -> RoutingReport | None:
    """Return where the last prompt of a request was sent; None if none was."""
    decision = None if record.sent is None else record.sent.decision
    return None if decision is None else routing_report(decision, record.engine_cached_tokens)


def routing_report(decision: RoutingDecision, engine_cached_tokens: int | None) -> RoutingReport:
    return RoutingReport(
        decision.worker_id,
        decision.rank,
        decision.reason,
        decision.num_tokens,
        decision.cached_tokens,
        engine_cached_tokens,
        decision.encoder_items_cached,
        decision.encoder_items_loaded,
        round(decision.expected_ms, 3),
        {name: round(ms, 3) for name, ms in msgspec.structs.asdict(decision.parts).items() if ms},
        decision.alternatives,
    )


def report_schema() -> str:
    """Return the JSON schema of a report, docs/report.schema.json."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(Report)}
    text = msgspec.json.format(msgspec.json.encode(schema), indent=2).decode()
    return re.sub(r"(?:\\n)+ *", " ", text) + "\n"  # docstrings


class ReportSender:
    """An ASGI `send` that adds a report to a response or an error, if its body is JSON or SSE.

    `report` returns the report's JSON; it is called once, at the end of the response.
    """

    def __init__(self, send: Send, report: Callable[[], bytes]) -> None:
        self._send = send
        self._report = report
        self._splice: JsonSplice | StreamSplice | None = None
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
        """Send the response start with its Content-Length corrected, unless it has been sent."""
        start, self._start = self._start, None
        if start is not None:
            headers = [(k, v) for k, v in start.get("headers", ()) if k.lower() != b"content-length"]
            if length is not None:
                headers.append((b"content-length", str(length).encode()))
            await self._send({**start, "headers": headers})


def _splice_for(start: Message, report: Callable[[], bytes]) -> JsonSplice | StreamSplice | None:
    headers = {k.lower(): v for k, v in start.get("headers", ())}
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if b"content-encoding" in headers:
        return None
    if kind == b"application/json":
        return JsonSplice(report)
    return StreamSplice(report) if kind == b"text/event-stream" else None


class JsonSplice:
    """Adds the report as a member of the body's JSON object. Any other body is passed on unchanged. `feed` returns what
    is sent for a piece of the body."""

    def __init__(self, report: Callable[[], bytes]) -> None:
        self._report = report
        #: The bytes from the last brace on, and the last non-blank character before it.
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
    """Adds the report as an event of a stream. Only what may be the first part of the end marker is held back."""

    def __init__(self, report: Callable[[], bytes]) -> None:
        self._report = report
        self._is_reported = False
        self._at_line_start = True
        self._chunk = self._held = b""

    def feed(self, piece: bytes, *, last: bool) -> bytes:
        if self._is_reported:
            return piece
        piece, self._held = self._held + piece, b""
        done = self._find_done(piece)
        if done >= 0:
            self._is_reported = True
            return piece[:done] + self._event(piece[:done] or self._chunk) + piece[done:]
        before, newline, line = piece.rpartition(b"\n")
        if line and not last and (newline or self._at_line_start) and _DONE.startswith(line):
            piece, self._held = before + newline, line
        if piece:
            self._at_line_start = piece.endswith(b"\n")
            self._chunk = piece
        return piece + self._own_event() if last else piece

    def _find_done(self, piece: bytes) -> int:
        """Return the offset of the end marker, or -1. JSON strings have no line breaks, so a model cannot forge it."""
        if self._at_line_start and piece.startswith(_DONE):
            return 0
        at = piece.find(b"\n" + _DONE)
        return at + 1 if at >= 0 else -1

    def _event(self, chunk: bytes) -> bytes:
        head = {**_chunk_members(chunk), "object": "medialane.report", "choices": []}
        text = json.dumps(head, separators=(",", ":")).encode()
        return b"".join((b"data: ", text[:-1], b',"medialane":', self._report(), b"}\n\n"))

    def _own_event(self) -> bytes:
        event = b'event: medialane.report\ndata: {"type":"medialane.report","medialane":'
        return b"".join((event, self._report(), b"}\n\n"))


def _chunk_members(chunk: bytes) -> dict[str, object]:
    """Return `_CHUNK_MEMBERS` of the last event of `chunk`; empty if it is not a completion chunk."""
    _, separator, data = chunk.rpartition(b"data: ")
    try:
        document = json.loads(data) if separator else None
    except ValueError:
        return {}
    return {k: document[k] for k in _CHUNK_MEMBERS if k in document} if isinstance(document, dict) else {}
