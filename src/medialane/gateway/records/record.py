"""One record of each HTTP request, filled by its scope while it runs, kept when it has ended.

It is the single source of what operators see (`view`), of the log, of the trace and of the report in a response. It has
no prompt, no media and no salt; of a URL it has the host, and of a hash eight digits are shown.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from medialane.gateway.intake.documents import PAGE_MARK
from medialane.gateway.request.handover_paths import HandoverPath
from medialane.observability.timeline import MAX_STEPS, LiveStep, RequestTimeline
from medialane.routing import WholeReason
from medialane.types.errors import ErrorReport, MedialaneError
from medialane.types.feature import MediaSpan, MoverName, StagedItem
from medialane.types.media import MediaRef, MediaSize, MediaSource
from medialane.types.request import EngineTimes, OutputDelta, RoutingDecision

#: Where the client has the item: in the body, at a URL, kept by us, named by a uuid, or processed by the client.
Source = Literal["body", "url", "kept", "uuid", "features"]

#: `hit`: it was cached. `shared`: another request was preparing it. `new`: it was prepared. `sent`: a worker does it.
ItemOutcome = Literal["hit", "shared", "new", "sent"]


#: `unneeded`: the item's tokens were in the KV cache. `loaded`: taken from the arena instead of encoding the item.
#: `encoded`: encoded, and kept for later requests. `unkept`: encoded, if it was not in the engine's encoder cache, and
#: not kept.
EmbeddingOutcome = Literal["unneeded", "loaded", "encoded", "unkept"]

#: Digits of a hash that are shown: they distinguish items, and find no content.
HASH_DIGITS = 8

#: Longest text of a client's, or of an error, that is kept.
MAX_CHARS = 200

#: Most characters that are read of a message or URL.
_MAX_READ_CHARS = 8192

_URL = re.compile(r"(?<![\w+.-])(?P<scheme>[\w+.-]++)://(?:[^\s/@]*@)?(?P<host>[^\s/?#\"')\]]*)[^\s\"')]*")

_DATA_URL = re.compile(r"data:[^\s\"')]+")


class ItemRecord:
    """What is known of one item. `timeline` has the times of what has ended, `live` of what has not. Between
    `started_at` and `ended_at` (perf_counter) it was found or made; `error` is the code with which that failed."""

    def __init__(self, ref: MediaRef) -> None:
        self.param = ref.param
        self.modality: MediaSource = ref.source  # of a page it is `document`
        self.source: Source = _source(ref)
        self.origin = _origin(ref.url or "")
        self.num_bytes = len(ref.data or b"")
        self.timeline = RequestTimeline()
        self.live: RequestTimeline | None = None
        self.started_at = self.ended_at = 0.0
        self.error = ""
        #: How long it was asked for, or prepared for another request.
        self.shared_ms = 0.0
        self.outcome: ItemOutcome | None = None
        self.embedding: EmbeddingOutcome | None = None
        self.mm_hash = ""
        self.num_tokens = 0
        self.feature_bytes = 0
        self.size = MediaSize()

    def found(self, timeline: RequestTimeline, shared_ms: float) -> None:
        """Add the times of having found or made it, or of having failed to."""
        self.live, self.started_at = None, self.started_at or timeline.started_at
        self.ended_at, self.shared_ms = time.perf_counter(), shared_ms
        self.num_bytes = self.num_bytes or timeline.media_bytes
        self.timeline.absorb(timeline)
        self.timeline.steps += timeline.steps[: MAX_STEPS - len(self.timeline.steps)]

    def prepared(self, item: StagedItem, num_tokens: int) -> None:
        """Record how the item was found."""
        feature = item.feature
        self.mm_hash, self.num_tokens, self.feature_bytes = feature.mm_hash, num_tokens, feature.nbytes
        self.size = feature.size
        if item.is_hit is None:
            self.outcome = "sent"
        elif item.is_hit:
            self.outcome = "hit"
        else:
            self.outcome = "new" if is_prepared(self.timeline) else "shared"


def embedding_outcome(span: MediaSpan, first: OutputDelta) -> EmbeddingOutcome:
    """Return what the worker did about the embedding of a media item, as far as its first output says."""
    if span.end <= (first.num_cached_tokens or 0):
        return "unneeded"
    if span.mm_hash in first.loaded:
        return "loaded"
    return "encoded" if span.mm_hash in first.embedded else "unkept"


def is_prepared(timeline: RequestTimeline) -> bool:
    """Return whether a preparer has worked for it."""
    return "decode" in timeline.seconds or "process" in timeline.seconds


def without_urls(message: str) -> str:
    """Return a message with no more of its URLs than scheme and host."""
    if (
        len(message) > _MAX_READ_CHARS
    ):  # without the word that is cut: the password of a URL is known by what follows it
        message = message[:_MAX_READ_CHARS].rpartition(" ")[0]
    return _DATA_URL.sub("data:...", _URL.sub(r"\g<scheme>://\g<host>/...", message))[:MAX_CHARS]


def _source(ref: MediaRef) -> Source:
    if ref.is_feature:
        return "features"
    if ref.data is not None:
        return "body"
    if ref.url is not None:
        return "kept" if ref.url.startswith("medialane:") else "url"
    return "uuid"


def _origin(url: str) -> str:
    """Return the host and port of a URL, without what a password may be in."""
    match = _URL.match(url) if len(url) <= _MAX_READ_CHARS else None
    return "" if match is None else match["host"][:MAX_CHARS]


#: Items that a record keeps; others are only counted.
MAX_ITEMS = 64


class Attempt:
    """One time that a prompt was to be sent to a worker. `decision` is None if that failed early; `error` is the code
    with which the attempt ended, empty if it was answered; what the engine had cached, and the time to the first token,
    are None until it was."""

    def __init__(self, worker: str, rank: int, path: HandoverPath | None) -> None:
        self.worker = worker
        self.rank = rank
        self.path = path
        self.chosen_at = time.time()
        self.decision: RoutingDecision | None = None
        self.is_sent = False
        self.error = ""
        self.engine_cached_tokens: int | None = None
        self.first_token_ms: float | None = None
        #: What copied the media of another host's store.
        self.movers: tuple[MoverName, ...] = ()


#: Whether another worker has computed a prompt: it has (`split`), it has `failed`; or why not: it, or the worker of the
#: answer, would have to process media (`no_path`), or `routing.WholeReason`.
PrefillOutcome = Literal["split", "failed", "no_path", WholeReason]


class PrefillReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whether another worker than that of the answer has computed the prompt, or why not. Of `worker`, which has:
    `cached_tokens` were in its KV cache, after `ms` it had computed the prompt. `transferred_tokens` were read from it
    by the worker of the answer: if they are few, that has computed the prompt again."""

    outcome: PrefillOutcome
    worker: str = ""
    cached_tokens: int | None = None
    transferred_tokens: int = 0
    ms: float = 0.0


class RequestError(msgspec.Struct, frozen=True):
    """With what a request has ended: a code, and, where that quotes no client, why."""

    code: str
    reason: str = ""


class RequestRecord:
    """What is known of one request; its scope fills it.

    `sent` is how its last prompt was sent, `engine_cached_tokens` what its engine had of that; `prompt_tokens` and the
    like are sums over all its prompts.
    """

    def __init__(self) -> None:
        self.timeline = RequestTimeline()
        self.received_at = time.time()
        self.id = ""
        self.path = ""
        self.model: str | None = None
        self.tenant: str | None = None
        self.streams: bool | None = None
        self.num_items = self.num_documents = 0
        self.items: dict[str, ItemRecord] = {}
        self.attempts: list[Attempt] = []
        self.sent: Attempt | None = None
        self.engine_cached_tokens: int | None = None
        #: Of its last prompt; None if no worker only computes prompts.
        self.prefill: PrefillReport | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.generated_tokens = 0
        #: Prompts that have not been answered.
        self.num_running = 0
        self.status: int | None = None
        self.error: RequestError | None = None
        self.first_token_at: float | None = None
        self.first_token_ms: float | None = None
        self.shared_ms = 0.0
        self.ended_at: float | None = None

    def received(self, refs: Sequence[MediaRef], *, model: str | None, streams: bool, num_documents: int = 0) -> None:
        """Record what the body has; the pages of documents are items."""
        self.model, self.streams = None if model is None else model[:MAX_CHARS], streams
        self.num_items, self.num_documents = len(refs), num_documents
        self.items = {ref.param: ItemRecord(ref) for ref in refs[:MAX_ITEMS]}

    @property
    def documents(self) -> dict[str, list[ItemRecord]]:
        """The pages that are kept of each document, by its field."""
        found: dict[str, list[ItemRecord]] = {}
        for item in self.items.values() if self.num_documents else ():
            if item.modality == "document":
                found.setdefault(item.param.partition(PAGE_MARK)[0], []).append(item)
        return found

    def finding(self, ref: MediaRef) -> _Finding:
        """Record that an item is looked up or made during the block. Its times are added to the request's."""
        return _Finding(self, self.items.get(ref.param))

    def found(self, timeline: RequestTimeline, shared_ms: float) -> None:
        """Add the times of having found or made an item."""
        self.timeline.absorb(timeline)
        self.shared_ms = max(self.shared_ms, shared_ms)

    def prepared(self, items: Sequence[StagedItem], num_tokens: Sequence[int] = ()) -> None:
        """Record the items of one prompt, and the number of its tokens for each, unless a worker expands it."""
        for item, count in zip(items, num_tokens or [0] * len(items), strict=True):
            if (record := self.items.get(item.ref.param)) is not None:
                record.prepared(item, count)

    def embedded(self, mm_hash: str, started_at: float) -> None:
        """Record that an encoder has had an item since then."""
        now = time.perf_counter()
        for item in self.items.values():
            if item.mm_hash == mm_hash:
                item.timeline.add("encode", now - started_at, started_at)
                item.ended_at = now

    def sending(self, decision: RoutingDecision, path: HandoverPath | None = None, *, is_sent: bool = True) -> None:
        """Record how and where a prompt is sent, or is about to be; text has no `path`. The last call counts: earlier
        attempts have failed. But of several prompts (documents that are scored) one with media counts."""
        attempt = self._attempt_of(decision) or self._add_attempt(decision.worker_id, decision.rank, path)
        attempt.decision, attempt.path, attempt.is_sent = decision, path, is_sent
        if path is not None or self.sent is None or self.sent.path is None:
            self.sent = attempt

    def prompt_sent(self) -> None:
        """Record that a worker has a prompt. Of an answer that is not streamed nothing else is known before its end."""
        self.timeline.enter("prefill" if self.streams else "answer")

    def prompt_answered(self) -> None:
        """Record that a prompt has its last output."""
        self.num_running -= 1
        if not self.num_running:
            self.timeline.enter("response")

    def attempt_failed(self, worker: str, rank: int, path: HandoverPath | None, code: str) -> None:
        """Record that a prompt was not sent to this worker, or not answered there."""
        attempt = self._open_attempt(worker, rank) or self._add_attempt(worker, rank, path)
        attempt.error = code

    def _open_attempt(self, worker: str, rank: int) -> Attempt | None:
        """Return the last attempt there that has not failed."""
        at_worker = (each for each in reversed(self.attempts) if (each.worker, each.rank) == (worker, rank))
        return next((attempt for attempt in at_worker if not attempt.error), None)

    def _attempt_of(self, decision: RoutingDecision) -> Attempt | None:
        tried = (each for each in reversed(self.attempts) if each.decision is decision)
        return next((attempt for attempt in tried if not attempt.error), None)

    def prefilled(self, output: OutputDelta, decision: RoutingDecision, seconds: float) -> None:
        """Record that another worker has computed a prompt, which was sent by this decision."""
        self._divide(output.times)
        self.prefill = PrefillReport("split", decision.worker_id, output.num_cached_tokens, ms=round(seconds * 1000, 2))
        if (attempt := self._attempt_of(decision)) is not None:
            attempt.engine_cached_tokens = output.num_cached_tokens

    def transferred(self, num_tokens: int) -> None:
        """Record how many tokens of that prompt the worker of the answer has read."""
        if self.prefill is not None:
            self.prefill = msgspec.structs.replace(self.prefill, transferred_tokens=num_tokens)

    def answered(
        self,
        first: OutputDelta,
        decision: RoutingDecision,
        num_prompt_tokens: int,
        outcomes: Mapping[str, EmbeddingOutcome],
        *,
        times: tuple[float, float],
    ) -> None:
        """Record the first output of a prompt, which was sent by this decision: how many of its tokens the engine had
        in its KV cache, what it did about embeddings, by the mm_hash of the item, and by what the store of the worker's
        host has copied media. `times` are when the prompt was sent and when it had its first token (perf_counter); of
        several prompts, the one with the earliest first token counts, whichever answer is complete first."""
        sent_at, first_token_at = times
        first_token_ms = (first_token_at - sent_at) * 1000
        if self.first_token_at is None:
            self._divide(first.times)
        if self.first_token_at is None or first_token_at < self.first_token_at:
            self.first_token_at, self.first_token_ms = first_token_at, first_token_ms
            self.timeline.seconds["first_token"] = first_token_at - sent_at
        if (attempt := self._attempt_of(decision)) is not None:
            attempt.engine_cached_tokens, attempt.first_token_ms = first.num_cached_tokens, round(first_token_ms, 2)
        if self.timeline.current != "answer":
            self.timeline.enter("answer")
        self.engine_cached_tokens = first.num_cached_tokens
        self.prompt_tokens = (self.prompt_tokens or 0) + num_prompt_tokens
        if first.num_cached_tokens is not None:
            self.cached_tokens = (self.cached_tokens or 0) + first.num_cached_tokens
        if self.sent is not None and first.movers:
            self.sent.movers = tuple(first.movers)
        for record in self.items.values():
            record.embedding = outcomes.get(record.mm_hash, record.embedding)

    def failed(self, error: ErrorReport, *, quotes_client: bool) -> None:
        """Record the error with which it ends. The message of one that `quotes_client` is not kept."""
        self.error = RequestError(error.code, "" if quotes_client else without_urls(error.message))

    def ended(self, *, is_disconnected: bool) -> None:
        """Record its end. Idempotent. What vLLM's app has answered itself has the status as code, as in its body."""
        if self.ended_at is not None:
            return
        self.ended_at = time.perf_counter()
        self.timeline.end()
        if self.error is None and is_disconnected:
            self.error = RequestError("client_disconnected")
        if self.status is None:
            self.status = 499 if is_disconnected else 500
        if self.error is None and self.status >= 400:
            self.error = RequestError(str(self.status))
        for (
            item
        ) in self.items.values():  # the record is kept for longer, and the sampled frames are in the report alone
            if item.size.metadata:
                item.size = msgspec.structs.replace(item.size, metadata=b"")

    @property
    def is_failed(self) -> bool:
        """Whether it has an error that is not its client's leaving."""
        return self.error is not None and self.error.code != "client_disconnected"

    @property
    def step(self) -> LiveStep | None:
        """What it waits for: the first of its items that is not there yet, or the request itself."""
        if self.ended_at is not None:
            return None
        return self.waits_in.current

    @property
    def step_ms(self) -> float:
        """How long it has waited for that."""
        return self.waits_in.current_ms

    @property
    def waits_in(self) -> RequestTimeline:
        """The timeline of what it waits for."""
        live = [item.live for item in self.items.values() if item.live is not None]
        return min(live, key=lambda each: (each.current != "fetch", each.entered_at)) if live else self.timeline

    @property
    def worker(self) -> str | None:
        return self.attempts[-1].worker if self.attempts else None

    @property
    def ttft_ms(self) -> float | None:
        """From its arrival to the first token; of one that waits for it, so far."""
        if self.first_token_at is None and (self.ended_at is not None or not self.attempts):
            return None
        return ((self.first_token_at or time.perf_counter()) - self.timeline.started_at) * 1000

    @property
    def total_ms(self) -> float:
        return ((self.ended_at or time.perf_counter()) - self.timeline.started_at) * 1000

    def _divide(self, times: EngineTimes | None) -> None:
        """Divide the time since a prompt was sent, whose first output has come: without streaming the whole answer."""
        if times is None:
            self.timeline.divide({}, rest="prefill")
        else:
            queue_s, prefill_s, decode_s = times.queue_s, times.prefill_s, times.decode_s
            self.timeline.divide({"answer": decode_s, "prefill": prefill_s, "queue": queue_s}, rest="transit")

    def _add_attempt(self, worker: str, rank: int, path: HandoverPath | None) -> Attempt:
        attempt = Attempt(worker, rank, path)
        if len(self.attempts) < MAX_ITEMS:
            self.attempts.append(attempt)
        return attempt


class _Finding:
    """The block of `RequestRecord.finding`. Not a generator, which would double its cost."""

    def __init__(self, request: RequestRecord, item: ItemRecord | None) -> None:
        self._request = request
        self._item = item
        self._timeline = RequestTimeline()
        self._timeline.enter("fetch")

    def __enter__(self) -> RequestTimeline:
        if self._item is not None:
            self._item.live = self._timeline
        return self._timeline

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        timeline, item = self._timeline, self._item
        is_shared = timeline.current == "prepare" and not is_prepared(timeline)
        shared_ms = timeline.current_ms if is_shared else 0.0
        self._request.found(timeline, shared_ms)
        if item is not None:
            item.found(timeline, shared_ms)
            if isinstance(error, MedialaneError):
                item.error = error.code
