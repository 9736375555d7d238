"""What is known of one media item of a request, and what of a client's URL may be kept."""

from __future__ import annotations

import re
import time
from typing import Literal

import msgspec

from medialane.observability.timeline import MAX_STEPS, StageTimeline
from medialane.types.feature import MediaSpan, StagedItem
from medialane.types.media import MediaRef, MediaSize, Modality
from medialane.types.request import OutputDelta

#: Where the client has the item: in the body, at a URL, kept by us, named by a uuid, or processed by the client.
Source = Literal["body", "url", "kept", "uuid", "features"]
#: `hit`: it was cached. `shared`: another request was preparing it. `new`: it was prepared. `sent`: a worker does it.
ItemOutcome = Literal["hit", "shared", "new", "sent"]


#: `unneeded`: the item's tokens were in the KV cache. `loaded`: taken from the arena instead of encoding the item.
#: `encoded`: encoded, and kept for later requests. `unkept`: encoded, if it was not in the engine's encoder cache, and
#: not kept.
EmbeddingOutcome = Literal["unneeded", "loaded", "encoded", "unkept"]
Cache = Literal["hit", "miss", "none"]

#: Digits of a hash that are shown: they tell items apart, and find no content.
HASH_DIGITS = 8
#: Longest text of a client's, or of an error, that is kept.
MAX_CHARS = 200
#: Of a message or URL, so many are read.
_MAX_READ_CHARS = 8192

_URL = re.compile(r"(?<![\w+.-])(?P<scheme>[\w+.-]++)://(?:[^\s/@]*@)?(?P<host>[^\s/?#\"')\]]*)[^\s\"')]*")
_DATA_URL = re.compile(r"data:[^\s\"')]+")


class ItemRecord:
    """What is known of one item. `timeline` has the times of what has ended, `live` of what has not. Between
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


class MediaReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was used of one item; members that do not apply are omitted.

    `cache` is whether its feature was cached, `none` if the worker computes it. `timestamps` are the times
    of the sampled frames, in seconds. `num_tokens` is the number of prompt tokens that represent the item. `embedding`
    is what the worker did about the item's embedding, if it keeps embeddings.
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
    embedding: EmbeddingOutcome | None = None


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


def embedding_outcome(span: MediaSpan, first: OutputDelta) -> EmbeddingOutcome:
    """Return what the worker did about the embedding of a media item, as far as its first output says."""
    if span.end <= (first.num_cached_tokens or 0):
        return "unneeded"
    if span.mm_hash in first.loaded:
        return "loaded"
    return "encoded" if span.mm_hash in first.embedded else "unkept"


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


def timestamps(size: MediaSize) -> tuple[float, ...]:
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
