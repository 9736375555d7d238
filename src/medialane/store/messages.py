"""Messages between the store and its clients on the same host, over one unix socket per client.

The client sends StoreHello; the store replies StoreRefused and closes the connection, or StoreWelcome. Afterwards:

    client                          store
    FindItem(call, ref, ...)->                              find or make an item
                            <-      SendData(call, range)   only if `num_bytes` is given and the bytes are not cached
    Proceed(call)           ->                              the client has written them, and writes no more
                            <-      ImageSize(call, ...)    only for an image of a URL, before it is decoded
    Proceed(call)           ->                              the request may have an image of this size
                            <-      ItemFound(call, hold, ...)  the client holds the item
    DescribeItem(call, ref, ...)->                          what a processed item would be, from its media's size
                            <-      SendData, ImageSize     as for FindItem, if the media must be measured
                            <-      ItemDescribed(call, ...)    nothing is held
    PutFeature(call, ref, ...)->                            find or receive tensors that a client has sent, as FindItem
    FindFeature(call, hash) ->                              find a feature by its hash, whoever has sent its media
                            <-      ItemFound(call, hold, ...)
    OpenDocument(call, ref, ...)->                          open a document, for its pages; nothing is rendered
                            <-      SendData                as for FindItem
                            <-      DocumentOpened(call, document)  nothing is held
    ResolveAlias(call, ref) ->                              replace a client's name of an item by its content
                            <-      AliasResolved(call, ref)
    HoldEntries(call, ranges)->                              hold entries that another client holds
                            <-      EntriesHeld(call, holds)    one hold each
    PassHolds(client, request, ...)->                       have another client hold entries that this one holds, and
                                                            find embeddings, or write them
                            <-      HoldsPassed(request, ranges, holds, embeddings) to that client, if it is connected
    GrantPulls(call, ranges)->                              let another host's store copy entries that the client holds
                            <-      PullsGranted(call, entries)
    FindEmbedding(call, key, ...)->                         find the output of the encoder for an item, or write it
                            <-      EmbeddingFound(call, hold, tensor, is_filled)   the client reads it, or writes there
                            <-      NoEmbedding(call)       another client is writing it, or there is no memory
    PullEntries(call, entries)->                            copy entries of another host's store, and hold the copies
                            <-      EntriesPulled(call, holds, ranges)
    PutMedia(call, ...)     ->                              lease media that the client sends
                            <-      SendData(call, range)   write them, or what was written and more, to this range
    Proceed(call, ...)      ->                              all of them are written, or the range is full
                            <-      MediaLeased(call, media)
    AskLease(call, ...)     ->                              find, renew or end the lease on such media, or list files
                            <-      MediaLeased(call, media)
    PublishImage(call, range)->                             let another process read a decoded image by RDMA, once
                            <-      ImagePublished(call, image)
                            <-      CallFailed(call, error) instead of any of these results
    Cancel(call)            ->                              no reply follows; the client writes no more
    Release(holds)          ->                              the client no longer reads or writes what it held
                            <-      Reclaim                 memory is short: release what is not in use
    Reclaimed               ->                              after that
    Ping                    ->                              every heartbeat interval, and before a scrape of metrics
                            <-      StoreStatus             at once after StoreWelcome and Ping, and every heartbeat

Calls run concurrently, and their results arrive in any order. The client releases a hold that
crosses a `Cancel`. Any frame that is not one of these messages closes the connection.

The hold on an embedding that is written ends like any other, at the first output of the request that was to write it or
when that has ended: if it is completed (`arena.locks`), it is cached, otherwise freed.

When a connection is lost, its client may still read what it holds, and write what it was asked for: both end when its
process has exited, which the lock of its slot shows (`arena.ClientSlot`). If it connects again, it has stopped writing,
and says what it still holds. So it does with the next store, which may have taken over the arena of the lost one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec

from medialane.observability.timeline import TimelineReport
from medialane.prepare.processor import Described
from medialane.types.errors import ErrorReport, ProtocolViolation
from medialane.types.feature import MAX_HEADER_BYTES, Feature, LocalCopy, RemoteEntry
from medialane.types.media import (
    Alias,
    DocumentOptions,
    EncodedMedia,
    MediaRef,
    MediaSize,
    MediaSource,
    OpenedDocument,
)
from medialane.types.media_lease import LeasedMedia
from medialane.types.stats import StoreStats
from medialane.types.tensor import MAX_TENSORS, ArenaOffer, ArenaRange, TensorDescriptor, TensorSpec
from medialane.wire.connection import UNREADABLE, checked, other_version

ScrapedAs = Literal["gateway", "worker"]

#: Must be equal on both sides; incremented by every incompatible change.
PROTOCOL_VERSION = 16

#: Longest time that a client waits for an embedding that another one is writing.
MAX_EMBEDDING_WAIT_MS = 60_000.0

#: Longest time in which a client sends media to be leased.
MAX_UPLOAD_S = 86_400.0

_KEY = re.compile(r"[0-9a-f]{64}")

#: The id of the HTTP request for which a call is made, for the log. Last in a message and empty by default, so releases
#: with it and without it understand each other.
RequestId = Annotated[str, msgspec.Meta(max_length=256, pattern=r"^[ -~]*$")]

#: The form of an item: its encoded bytes, an image file that is made of it (of a page, whose document workers do not
#: decode), the decoder's output, or the processor's (its feature).
Form = Literal["encoded", "file", "decoded", "processed"]

LeaseAction = Literal["find", "renew", "end"]


class HeldEntry(msgspec.Struct, frozen=True, array_like=True):
    """What a client holds: an entry that it reads or, if it `is_fill`, a range that processes of its engine write."""

    range: ArenaRange
    is_fill: bool = False


class StoreHello(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """Registration of a client. `client_id` is unique per process; a second connection of it replaces the first, and
    takes over its holds that are in `holds`, by id; they are holds on entries of `arena`, of which the client
    has the lock of `slot`.

    `processor` are the processor settings for which a gateway wants features; empty for a worker. Their digest is part
    of the features' keys. `scraped` is the kind of a client whose page of metrics has the store's, too, if they
    are exposed there (`StoreStatus.exposed_by`).
    """

    version: int = PROTOCOL_VERSION
    client_id: str
    processor: dict[str, str] = {}
    arena: str = ""
    slot: int = 0
    holds: dict[int, HeldEntry] = {}
    scraped: ScrapedAs | None = None


class StoreWelcome(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """The store's arena, and the slot whose lock the client takes before it uses the arena. `can_grant` is whether
    other hosts' stores can connect to the store."""

    pid: int
    arena: ArenaOffer
    slot: int
    can_grant: bool = False


class StoreRefused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Also sent after StoreWelcome, once the store knows its processor settings: the client's are others."""

    error: ErrorReport


class FindItem(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`ref` has a URL or a content hash, but no data: the client sends `num_bytes` bytes if the store asks for them.

    `options` are the request's processor options, for form `processed`. With the digest of an `encoder`, an item of
    that form whose embedding is cached is found as a feature without tensors, in the entry of the embedding.

    A reference to a feature (`MediaRef.is_feature`) is found if its client has had that feature before. With `refers`,
    form `encoded`, the client may name the item's feature, although nobody has made it.
    """

    call_id: int
    ref: MediaRef
    form: Form
    options: bytes = b"{}"
    num_bytes: int | None = None
    encoder: str = ""
    refers: bool = False
    request_id: RequestId = ""


class FindCached(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Those of several items, each as in FindItem and with a content hash, that are cached, at once. Others are then
    found one by one: each may need bytes, or have to wait."""

    call_id: int
    refs: list[MediaRef]
    form: Form
    options: bytes = b"{}"
    encoder: str = ""


class PutFeature(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Tensors that a client has sent: the feature whose hash is `ref.content`. Unless it is cached, the store asks for
    the bytes of the tensors (`SendData`), which lie in the entry as in `arena.layout`."""

    call_id: int
    ref: MediaRef
    described: Described
    specs: Annotated[tuple[TensorSpec, ...], msgspec.Meta(max_length=MAX_TENSORS)]
    request_id: RequestId = ""

    def __post_init__(self) -> None:
        if not (self.ref.is_feature and _KEY.fullmatch(self.ref.content or "")):
            raise ValueError("the hash of a feature has 64 hex digits")


class FindFeature(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A client of this host wants the feature `mm_hash`, of any tenant: who may open the socket is the operator."""

    call_id: int
    mm_hash: str

    def __post_init__(self) -> None:
        if not _KEY.fullmatch(self.mm_hash):
            raise ValueError("the hash of a feature has 64 hex digits")


class SendData(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Write the item's bytes to the payload of this entry; of media to be leased, again the bytes that were written to
    an earlier one."""

    call_id: int
    range: ArenaRange


class ImageSize(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The size of an image in pixels, by its header."""

    call_id: int
    width: int
    height: int


class Proceed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to SendData and ImageSize. If it is no, the client sends Cancel instead. Of media to be leased, their
    size and content hash if they have been written, neither if the range is full."""

    call_id: int
    num_bytes: Annotated[int, msgspec.Meta(ge=0)] | None = None
    content: Annotated[str, msgspec.Meta(max_length=64)] = ""

    def __post_init__(self) -> None:
        if self.num_bytes is not None and not _KEY.fullmatch(self.content):
            raise ValueError("a content hash has 64 hex digits")


class ItemFound(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The item is the entry `range` of the arena: `encoded` for form `encoded`, otherwise `feature`. `is_hit` is
    whether it was cached."""

    call_id: int
    hold_id: int
    range: ArenaRange
    content_hash: str
    is_hit: bool
    timeline: TimelineReport
    feature: Feature | None = None
    encoded: EncodedMedia | None = None


class CachedFound(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """In the order of the references; None for an item that is not cached."""

    call_id: int
    items: list[ItemFound | None]


class DescribeItem(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`ref`, `options` and `num_bytes` are as in FindItem. If the client knows the `size` of the media as decoded, the
    store needs neither their bytes nor the item."""

    call_id: int
    ref: MediaRef
    options: bytes = b"{}"
    num_bytes: int | None = None
    size: MediaSize | None = None
    request_id: RequestId = ""


class ItemDescribed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What is known of the processed item without its content; None if its header also depends on that."""

    call_id: int
    content_hash: str
    described: Described | None


class OpenDocument(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`ref` and `num_bytes` are as in FindItem; `ref` is to a document."""

    call_id: int
    ref: MediaRef
    options: DocumentOptions
    num_bytes: int | None = None
    request_id: RequestId = ""

    def __post_init__(self) -> None:
        if self.ref.source != "document":
            raise ValueError("not a reference to a document")


class DocumentOpened(msgspec.Struct, frozen=True, array_like=True, tag=True):
    call_id: int
    document: OpenedDocument


class ResolveAlias(msgspec.Struct, frozen=True, array_like=True, tag=True):
    call_id: int
    ref: MediaRef


class AliasResolved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    call_id: int
    ref: MediaRef


class HoldEntries(msgspec.Struct, frozen=True, array_like=True, tag=True):
    call_id: int
    ranges: list[ArenaRange]


class EntriesHeld(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One hold for each of the ranges, in their order."""

    call_id: int
    hold_ids: list[int]
    ranges: list[ArenaRange]


class PassedEmbedding(msgspec.Struct, frozen=True, array_like=True):
    """As `EmbeddingFound`, of the embedding `key`."""

    key: str
    hold_id: int
    tensor: TensorDescriptor
    is_filled: bool


class HoldsPassed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The receiver holds these entries, in the order of the ids, and these embeddings."""

    request_id: str
    ranges: list[ArenaRange]
    hold_ids: list[int]
    embeddings: list[PassedEmbedding] = []


class GrantPulls(msgspec.Struct, frozen=True, array_like=True, tag=True):
    call_id: int
    ranges: list[ArenaRange]


class PullsGranted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """In the order of the ranges."""

    call_id: int
    entries: list[RemoteEntry]


class FindEmbedding(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The embedding `key` of the item that `feature` describes, without tensors. If it is not there, the client wants
    to write a tensor of `spec`; if another client does, it waits for that."""

    call_id: int
    key: str
    feature: Feature
    spec: TensorSpec
    wait_ms: float = 0.0

    def __post_init__(self) -> None:
        if not _KEY.fullmatch(self.key):
            raise ValueError("the key of an embedding has 64 hex digits")
        if self.feature.tensors or self.feature.embedding is not None or len(self.feature.header) > MAX_HEADER_BYTES:
            raise ValueError("not the description of an item without tensors")
        if not self.spec.nbytes or not 0 <= self.wait_ms <= MAX_EMBEDDING_WAIT_MS:
            raise ValueError("an embedding has a size, and the wait for it a limit")


class PassHolds(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A gateway is about to send a request that reads these entries to the worker whose `client_id` is `to`, which will
    want these embeddings. Embeddings for which it would have to wait are not passed: it asks for them itself."""

    to: str
    request_id: str
    ranges: list[ArenaRange]
    embeddings: list[FindEmbedding] = []


class EmbeddingFound(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """If not `is_filled`, a process of the client may write to `tensor` while the client holds it."""

    call_id: int
    hold_id: int
    tensor: TensorDescriptor
    is_filled: bool


class NoEmbedding(msgspec.Struct, frozen=True, array_like=True, tag=True):
    call_id: int


class PullEntries(msgspec.Struct, frozen=True, array_like=True, tag=True):
    call_id: int
    entries: list[RemoteEntry]


class EntriesPulled(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The copies in the store's arena, and a hold on each, in the order of the entries."""

    call_id: int
    hold_ids: list[int]
    copies: list[LocalCopy]


class PublishImage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The client holds the image until the reply."""

    call_id: int
    range: ArenaRange


class ImagePublished(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`image` is a `media.PublishedImage` as JSON."""

    call_id: int
    image: bytes


class PutMedia(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The client has media of `owner` to be leased: `num_bytes` of them, 0 if it does not know, within `timeout_s`.
    Without a `modality`, that is found out. The kind of the `alias` is not known yet. A file has a `name` and a
    `purpose`, with which it is listed."""

    call_id: int
    owner: str
    salt: str
    num_bytes: Annotated[int, msgspec.Meta(ge=0)]
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_UPLOAD_S)]
    ttl_s: float | None = None
    modality: MediaSource | None = None
    alias: Alias | None = None
    name: Annotated[str, msgspec.Meta(max_length=255)] = ""
    purpose: Annotated[str, msgspec.Meta(max_length=64)] = ""


class AskLease(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From a request of `owner` with this `salt`, about the lease on `media`; None: all of its leases on files, but for
    those that were taken over from another store. `ttl_s` is for a lease that is renewed."""

    call_id: int
    owner: str
    media: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")] | None
    action: LeaseAction
    ttl_s: float | None = None
    salt: str = ""


class MediaLeased(msgspec.Struct, frozen=True, array_like=True, tag=True):
    call_id: int
    media: list[LeasedMedia]


class CallFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    call_id: int
    error: ErrorReport


class TakenBy(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """For whom the client makes this call, which follows, and where (`--debug-holds`)."""

    call_id: int
    taker: str


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=True):
    call_id: int


class Release(msgspec.Struct, frozen=True, array_like=True, tag=True):
    hold_ids: list[int]


class Reclaim(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Release the holds that are not in use. The store waits for Reclaimed before it refuses an item."""


class Reclaimed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class StorePing(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class StoreStatus(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`problem` describes what is wrong with media preparation, None if nothing is. `has_started` is whether the store
    has loaded its processor; until then, items that need a preparer wait for it. `exposed_by` is the client that
    exposes the statistics to scrapers, so that nothing is counted twice: empty if gateways do, or no client does."""

    stats: StoreStats
    problem: str | None = None
    has_started: bool = True
    exposed_by: str = ""


Question = SendData | ImageSize
LongCall = (
    FindItem
    | DescribeItem
    | OpenDocument
    | PutFeature
    | FindFeature
    | FindEmbedding
    | PullEntries
    | PublishImage
    | PutMedia
)
StoreCall = LongCall | FindCached | ResolveAlias | HoldEntries | GrantPulls | AskLease
Found = (
    ItemFound
    | CachedFound
    | ItemDescribed
    | DocumentOpened
    | EmbeddingFound
    | NoEmbedding
    | AliasResolved
    | EntriesHeld
    | EntriesPulled
)
Reply = Found | PullsGranted | ImagePublished | MediaLeased | CallFailed
ToStore = StoreHello | StoreCall | TakenBy | PassHolds | Proceed | Cancel | Release | Reclaimed | StorePing
FromStore = StoreWelcome | StoreRefused | Question | Reply | HoldsPassed | Reclaim | StoreStatus

_TO_STORE: msgspec.msgpack.Decoder[ToStore] = msgspec.msgpack.Decoder(ToStore)

#: Decodes a message of the store. Raises ProtocolViolation.
decode_from_store: Callable[[memoryview], FromStore] = checked(msgspec.msgpack.Decoder(FromStore).decode)


def decode_to_store(frame: memoryview) -> ToStore:
    """Decode a client's message. Raises ProtocolViolation."""
    try:
        return _TO_STORE.decode(frame)
    except UNREADABLE as error:
        if (version := other_version(frame, "StoreHello", PROTOCOL_VERSION)) is not None:
            return StoreHello(version=version, client_id="")
        raise ProtocolViolation(f"unreadable message: {error}") from error
