"""What is known of one media item of a request, and what of a client's URL may be kept."""

from __future__ import annotations

import re
import time

import msgspec

from medialane.gateway.report import EmbeddingOutcome
from medialane.gateway.requests.views import ItemOutcome, ItemView, Source
from medialane.observability.timeline import MAX_STEPS, StageTimeline
from medialane.types.feature import StagedItem
from medialane.types.media import MediaRef, MediaSize

#: Digits of a hash that are shown: they tell items apart, and find no content.
HASH_DIGITS = 8
#: Longest text of a client's, or of an error, that is kept.
MAX_CHARS = 200
#: Of a message or URL, so many are read.
_MAX_READ_CHARS = 8192
#: A shorter wait for another request's preparation is not shown.
_LEAST_MS = 0.05

_URL = re.compile(r"(?<![\w+.-])(?P<scheme>[\w+.-]++)://(?:[^\s/@]*@)?(?P<host>[^\s/?#\"')\]]*)[^\s\"')]*")
_DATA_URL = re.compile(r"data:[^\s\"')]+")


class ItemRecord:
    """What is known of one item. `timeline` has the times of what has ended, `live` those of what has not. Between
    `started_at` and `ended_at` (perf_counter) it was found or made; `error` is the code with which that failed."""

    def __init__(self, ref: MediaRef) -> None:
        self.param = ref.param
        self.modality = ref.modality
        self.source: Source = _source(ref)
        self.origin = _origin(ref.url or "")
        self.num_bytes = len(ref.data or b"")
        self.timeline = StageTimeline()
        self.live: StageTimeline | None = None
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

    def found(self, timeline: StageTimeline, shared_ms: float) -> None:
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
        self.size = msgspec.structs.replace(feature.size, metadata=b"") if feature.size.metadata else feature.size
        if item.is_hit is None:
            self.outcome = "sent"
        elif item.is_hit:
            self.outcome = "hit"
        else:
            self.outcome = "new" if is_prepared(self.timeline) else "shared"

    def view(self) -> ItemView:
        return ItemView(
            param=self.param,
            modality=self.modality,
            source=self.source,
            origin=self.origin or None,
            outcome=self.outcome,
            embedding=self.embedding,
            stage=None if self.live is None else self.live.current,
            stages_ms=stages_ms(self.timeline, self.live, self.shared_ms),
            bytes=self.num_bytes or None,
            feature_bytes=self.feature_bytes or None,
            width=self.size.width or None,
            height=self.size.height or None,
            frames=self.size.num_frames or None,
            samples=self.size.num_samples or None,
            tokens=self.num_tokens or None,
            hash=self.mm_hash[:HASH_DIGITS] or None,
        )


def stages_ms(timeline: StageTimeline, live: StageTimeline | None, shared_ms: float) -> dict[str, float]:
    """Return the milliseconds of each stage; of the current one of `live`, those so far. `shared_ms` are those in which
    another request's preparation was waited for."""
    stages: dict[str, float] = {
        name: round(s * 1000, 1) for name, s in timeline.seconds.items() if name != "first_token"
    }
    if shared_ms >= _LEAST_MS and not is_prepared(timeline):
        stages["prepare"] = round(shared_ms, 1)
    if live is not None:
        stages[live.current] = round(live.current_ms, 1)
    return stages


def is_prepared(timeline: StageTimeline) -> bool:
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
