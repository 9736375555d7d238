"""Finds media items and makes missing ones: encoded bytes, decoded media, or features.

What is missing is fetched, decoded and processed. Encoded bytes are cached by content hash, so other options, another
form, or a URL known to be unchanged need neither a download nor a copy.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Literal, NamedTuple

import msgspec
from cachetools import LRUCache

from medialane.arena import Arena, Pin, Reservation, describe, header_bytes, layout
from medialane.media import MediaConfig, image_size, needs_probe
from medialane.media.data_url import PIXMAP_TYPE, is_published, pixmap_size
from medialane.media.fetch import Fetcher
from medialane.observability.timeline import RequestTimeline
from medialane.prepare import Described, PreparerPool
from medialane.runtime.tasks import SingleFlight
from medialane.store.embeddings import Embeddings
from medialane.store.encoded_store import EncodedStore
from medialane.store.media_leases import MediaLeases
from medialane.store.messages import Form
from medialane.store.names import Aliases, FeatureSource, KnownFeatures
from medialane.store.published_images import PublishedImages
from medialane.types.errors import (
    ArenaFull,
    InvalidRequest,
    MediaTooLarge,
    MediaUrlForbidden,
    UnknownMedia,
    UnknownMediaUuid,
    UuidConflict,
)
from medialane.types.feature import Feature
from medialane.types.hashing import decoded_key, embedding_key, feature_key, merged_options
from medialane.types.media import (
    MAX_DOCUMENTS_BYTES,
    Alias,
    DocumentOptions,
    EncodedMedia,
    MediaRef,
    MediaSize,
    Modality,
    OpenedDocument,
    naming,
)
from medialane.types.media_lease import is_leased
from medialane.types.tensor import ArenaRange, TensorSpec

#: Receives the encoded bytes of the item, whose content hash its caller has given, into the arena.
Upload = Callable[[EncodedStore], Awaitable[Pin[EncodedMedia]]]

#: Receives the tensors of a feature that a client has sent, into this range of the arena.
Receive = Callable[[Reservation], Awaitable[object]]

#: Returns if the request may have an image of this width and height; otherwise the caller is cancelled.
Admit = Callable[[int, int], Awaitable[None]]

#: Encoded bytes may be evicted between download and use if the arena is far too small; then they are fetched again.
_MAX_ATTEMPTS = 3

#: Size of each cache of verdicts (probed, too large), in items.
_MAX_CACHED_VERDICTS = 16_384

#: Bytes of the sizes, and of the descriptions, that are kept. A header has some hundred bytes, but may have 4 MiB; the
#: metadata of a long video have 6 KB.
_MAX_SIZES_BYTES = 16 * 1024 * 1024

#: Of an entry besides its header and metadata.
_ENTRY_BYTES = 512

#: Longer options are a client's, and are not kept.
_MAX_OPTIONS_BYTES = 256

_TOO_SMALL = "the shared memory is too small for the media of the requests in flight"

_UNKNOWN = "unknown or expired uuid: send the URL or data of the media as well"

#: The same for all reasons, so that nobody learns what others have.
_UNKNOWN_FEATURE = "unknown or expired feature: send its tensors or media"


class PinnedItem(NamedTuple):
    """A pin on an item's encoded bytes, decoded form or feature, and the hash of its encoded bytes.

    `is_hit` is whether it was cached.
    """

    content_hash: str
    pin: Pin[Feature] | Pin[EncodedMedia]
    is_hit: bool


class Processing(NamedTuple):
    """How an item is processed: the digest of the processor's settings, and the request's `options`. `encoder` is that
    of the encoder whose output does as well, if any."""

    processor: str
    options: bytes
    encoder: str = ""


#: What is made of an item's bytes.
_Made = Processing | Literal["file", "decoded"]


class ItemSource(NamedTuple):
    """A reference, and what its client offers for this call: the bytes by `upload`, for a reference to what it has
    sent. `admit` is asked before an image of a URL is decoded, or sent to a worker that decodes it."""

    ref: MediaRef
    timeline: RequestTimeline
    upload: Upload | None = None
    admit: Admit | None = None


class Items:
    """Returns pins on media items; concurrent preparations of the same item are shared.

    References have a URL or a content hash. The caller owns every pin that is returned. Errors name the request field
    of the reference.
    """

    def __init__(
        self,
        *,
        arena: Arena,
        pool: PreparerPool,
        fetcher: Fetcher,
        media: MediaConfig,
        aliases: Aliases,
        leases: MediaLeases,
        published: PublishedImages | None = None,
        features: KnownFeatures | None = None,
    ) -> None:
        """Without `published`, images that clients have published are refused."""
        self._features = features or KnownFeatures()
        self._arena = arena
        self._pool = pool
        self._fetcher = fetcher
        self._published = published
        self._media = media
        self._store = EncodedStore(arena, media)
        self.embeddings = Embeddings(arena)
        #: Sizes of media, measured by preparers, and what processors have made of blanks of such sizes.
        self._sizes: LRUCache[tuple[str, Modality], MediaSize] = LRUCache(_MAX_SIZES_BYTES, getsizeof=_size_bytes)
        self._measuring: SingleFlight[object, MediaSize] = SingleFlight()
        self._described: LRUCache[object, Described | None] = LRUCache(_MAX_SIZES_BYTES, getsizeof=_described_bytes)
        self._describing: SingleFlight[object, Described | None] = SingleFlight()
        self._documents: LRUCache[str, OpenedDocument] = LRUCache(MAX_DOCUMENTS_BYTES, getsizeof=attrgetter("nbytes"))
        self._opening: SingleFlight[str, OpenedDocument] = SingleFlight()
        self._aliases = aliases
        self.leases = leases
        self._preparing: SingleFlight[str, Pin[Feature]] = SingleFlight(share=Pin.duplicate, release=Pin.release)
        self._probing: SingleFlight[str, None] = SingleFlight()
        #: Content that a preparer has opened or decoded without an error: a worker may decode it.
        self._probed: LRUCache[str, None] = LRUCache(_MAX_CACHED_VERDICTS)
        #: Features that cannot fit into the arena: finding out again would cost a preparer seconds each time.
        self._too_large: LRUCache[str, str] = LRUCache(_MAX_CACHED_VERDICTS)

    def resolve(self, ref: MediaRef) -> MediaRef:
        """Return a reference that has only an alias with the content and options of the alias. Raises
        UnknownMediaUuid."""
        bound = None if ref.alias is None else self._aliases.find(ref.salt, ref.alias)
        if bound is None:
            raise UnknownMediaUuid(_UNKNOWN, param=ref.param)
        return msgspec.structs.replace(ref, content=bound.content, io=bound.io, options=bound.options)

    async def find(self, source: ItemSource, form: Form, processing: Processing) -> PinnedItem:
        """Return an item in the requested form, made if it is missing. `processing` matters for form `processed` only;
        if the embedding of its encoder is cached, that is returned, as a feature without tensors."""
        with naming(ref := source.ref):
            if ref.is_feature:
                return await self._known(source, processing)
            if form == "encoded":
                pinned = await self._probed_bytes(source)
            else:
                pinned = await self._find_or_prepare(source, processing if form == "processed" else form)
            if form == "processed":
                self._remember(ref, processing, pinned.content_hash)
            # Bind the alias, unless it was all that was sent, now that the content has proved usable.
            if ref.alias is not None and (ref.url is not None or source.upload is not None):
                self._bind(ref.salt, ref.alias, pinned)
        return pinned

    def cached(self, ref: MediaRef, form: Form, processing: Processing) -> PinnedItem | None:
        """As `find`, of an item whose content is known, if there is nothing to do for it."""
        if form == "encoded":
            return None
        content = ref.content or ""
        made: _Made = processing if form == "processed" else form
        if (pin := self._cached(self._key(ref, made, content), made)) is None:
            return None
        if form == "processed":
            self._remember(ref, processing, content)
        return PinnedItem(content, pin, is_hit=True)

    async def open_document(self, source: ItemSource, options: DocumentOptions) -> OpenedDocument:
        """Return a document with the pages that are wanted. Nothing is rendered; what was opened with these options is
        remembered. Raises what `media.open_document` raises, and what `find` raises for encoded bytes."""
        with naming(ref := source.ref):
            content = await self._content(source, need_data=False)
            if (opened := self._documents.get(_document_key(ref, content, options))) is None:
                content, pin = await self._encoded(source, content)
                with pin:
                    key = _document_key(ref, content, options)
                    opened = await self._opening.do(key, lambda: self._open(ref, content, options))
                with suppress(ValueError):  # too large to be kept
                    self._documents[key] = opened
        return opened

    async def _open(self, ref: MediaRef, content: str, options: DocumentOptions) -> OpenedDocument:
        with self._held(ref, content) as stored:
            return await self._pool.open_document(stored, options)

    async def describe(
        self, source: ItemSource, options: bytes, size: MediaSize | None
    ) -> tuple[str, Described | None]:
        """Return the content hash of an item, and what is known of it, processed with these options, from the `size` of
        its media, which is measured if it is not given: None if its header also depends on its content. Nothing is
        processed but a blank of that size, and no alias is bound. Raises what `find` raises."""
        with naming(ref := source.ref):
            content = ref.content or ""
            if size is None:
                content, size = await self._measured(source)
            return content, await self._describe_blank(ref.modality, size, merged_options(options, ref.options))

    async def _measured(self, source: ItemSource) -> tuple[str, MediaSize]:
        """Return content hash and size of the media, as decoded: known, or measured by a preparer."""
        ref, content = source.ref, await self._content(source, need_data=False)
        if (page := ref.page) is not None:
            return content, MediaSize(width=page.width, height=page.height)
        if (size := self._sizes.get(_size_key(ref, content))) is not None:
            return content, size
        content, pin = await self._encoded(source, content)
        with pin:
            await self._admit(source, pin.value)
            size = await self._measuring.do(_size_key(ref, content), lambda: self._measure(ref, content))
        with suppress(ValueError):  # too large to be kept
            self._sizes[_size_key(ref, content)] = size
        return content, size

    async def _measure(self, ref: MediaRef, content: str) -> MediaSize:
        with self._held(ref, content) as stored:
            return await self._pool.measure(stored, ref.io)

    async def _describe_blank(self, modality: Modality, size: MediaSize, options: bytes) -> Described | None:
        """As `PreparerPool.describe_blank`, once for all concurrent requests; None also if the processor refuses a
        blank, so that processing the item says why it is refused, if it is."""

        async def describe() -> Described | None:
            try:
                return await self._pool.describe_blank(modality, size, options)
            except InvalidRequest:
                return None

        key = modality, size, options
        if key in self._described:
            return self._described[key]
        described = await self._describing.do(key, describe)
        if len(options) <= _MAX_OPTIONS_BYTES:
            with suppress(ValueError):
                self._described[key] = described
        return described

    async def refer(self, source: ItemSource, processing: Processing) -> PinnedItem:
        """Return the encoded bytes of an item, for which no feature need exist: its client may name it from now on."""
        pinned = await self.find(source, "encoded", processing)
        self._remember(source.ref, processing, pinned.content_hash)
        return pinned

    async def put(
        self, ref: MediaRef, described: Described, specs: Sequence[TensorSpec], *, receive: Receive, writer: int
    ) -> PinnedItem:
        """Return the feature of this hash, `ref.content`, of tensors that a client has sent: they are received by
        `receive`, written by the client with the slot `writer`, unless they are cached."""
        key, is_hit = ref.content or "", True
        with naming(ref):
            if (pin := self._arena.lookup(key, "processed")) is None:
                num_described = header_bytes(described.header, specs)
                reservation = self._arena.reserve(layout(specs)[1], writer=writer, header_bytes=num_described)
                await receive(reservation)
                with reservation:
                    tensors = describe(reservation.range, specs)
                    feature = Feature(ref.modality, key, described.header, tensors, described.size)
                    pin, is_hit = self._arena.publish(reservation, key, feature), False
            self._features.remember(key, ref)
        return PinnedItem(key, pin, is_hit)

    def _remember(self, ref: MediaRef, processing: Processing, content: str) -> None:
        """Let the client of `ref` name its feature."""
        options = merged_options(processing.options, ref.options)
        made_of = msgspec.structs.replace(ref, content=content, options=b"{}", alias=None)
        key = self._key(ref, processing, content)
        self._features.remember(key, ref, FeatureSource(made_of, options, processing.processor))

    async def feature(self, mm_hash: str) -> PinnedItem:
        """Return a feature by its hash, for the operator: whoever has sent its media. Made again if it was evicted.
        Raises UnknownMedia."""
        if (pin := self._arena.lookup(mm_hash, "processed")) is not None:
            return PinnedItem(mm_hash, pin, is_hit=True)
        known = self._features.find_any(mm_hash)
        if known is None or known.source is None:
            raise UnknownMedia("unknown or expired feature")
        source = ItemSource(known.source.ref, RequestTimeline())
        return await self._made_again(mm_hash, source, known.source, encoder="")

    async def _known(self, source: ItemSource, processing: Processing) -> PinnedItem:
        """Return the feature that the client names, made again if it was evicted. Raises UnknownMedia."""
        ref = source.ref
        if (known := self._features.find(ref)) is None:
            raise UnknownMedia(_UNKNOWN_FEATURE)
        key = ref.content or ""
        if (pin := self._cached(key, processing)) is not None:
            source.timeline.num_hits += 1
            return PinnedItem(key, pin, is_hit=True)
        if known.source is None:
            raise UnknownMedia(_UNKNOWN_FEATURE)
        return await self._made_again(key, source, known.source, encoder=processing.encoder)

    async def _made_again(self, key: str, source: ItemSource, made_of: FeatureSource, *, encoder: str) -> PinnedItem:
        processing = Processing(made_of.processor, made_of.options, encoder)
        try:
            pinned = await self._find_or_prepare(source._replace(ref=made_of.ref), processing)
        except UnknownMediaUuid as error:
            raise UnknownMedia(_UNKNOWN_FEATURE) from error
        return pinned._replace(content_hash=key)

    def _bind(self, salt: str, alias: Alias, pinned: PinnedItem) -> None:
        try:
            self._aliases.bind(salt, alias, pinned.content_hash)
        except UuidConflict:
            pinned.pin.release()
            raise

    async def publish(self, entry: ArenaRange) -> bytes:
        """See `PublishedImages.publish`. Raises MediaUrlForbidden if images must not be published."""
        if self._published is None:
            raise MediaUrlForbidden("this server does not publish images (--allow-media-rdma)")
        return await self._published.publish(entry)

    async def _probed_bytes(self, source: ItemSource) -> PinnedItem:
        """Return the encoded bytes. If their header must be checked, a preparer has opened them; bytes that it rejects
        are dropped from the cache."""
        content, pin = await self._encoded(source)
        source.timeline.media_bytes = pin.value.num_bytes
        try:
            await self._admit(source, pin.value)
            await self._probe(source.ref, pin.value)
        except BaseException as error:  # cancellation included: the pin has no other owner
            pin.release()
            if isinstance(error, InvalidRequest):
                self._store.forget(content, source.ref.salt)
            raise
        return PinnedItem(content, pin, is_hit=False)

    async def _find_or_prepare(self, source: ItemSource, made: _Made) -> PinnedItem:
        """Look up the requested form, and prepare it if it is missing.

        If only the content hash of a URL is known, its content may have changed when its bytes are fetched: then the
        new content is looked up, and the feature is made from it and has its key.
        """
        need_data, timeline = False, source.timeline
        for _ in range(1 + _MAX_ATTEMPTS):
            content = await self._content(source, need_data=need_data)
            key = self._key(source.ref, made, content)
            if (pin := self._cached(key, made)) is not None:
                timeline.num_hits += 1
                return PinnedItem(content, pin, is_hit=True)
            encoded = await self._stored(source, content)
            if encoded is not None:
                timeline.media_bytes = encoded.value.num_bytes
                # Every waiting request pins the bytes, so they outlive the request that started the shared preparation.
                with encoded:
                    await self._admit(source, encoded.value)
                    pin = await self._prepare_once(source, content, made, key)
                timeline.num_misses += 1  # not before: a caller may try again after ArenaFull
                return PinnedItem(content, pin, is_hit=False)
            need_data = True
        raise ArenaFull(_TOO_SMALL)

    def _cached(self, key: str, made: _Made) -> Pin[Feature] | None:
        if not isinstance(made, Processing):
            return self._arena.lookup(key, "decoded")
        if made.encoder:
            embedded = self.embeddings.lookup(embedding_key(mm_hash=key, encoder=made.encoder))
            if embedded is not None:
                return embedded
        return self._arena.lookup(key, "processed")

    async def _encoded(self, source: ItemSource, known: str = "") -> tuple[str, Pin[EncodedMedia]]:
        """Return the encoded bytes, fetched or received if they are not cached. `known` is the content hash that
        `_content` has just returned."""
        for attempt in range(_MAX_ATTEMPTS):
            content = known if known and not attempt else await self._content(source, need_data=attempt > 0)
            if (pin := await self._stored(source, content)) is not None:
                return content, pin
        raise ArenaFull(_TOO_SMALL)

    def _key(self, ref: MediaRef, made: _Made, content: str) -> str:
        content, io = ref.identity(content)
        if not isinstance(made, Processing):
            return decoded_key(content=content, io=io if made == "decoded" else b"file" + io, salt=ref.salt)
        return feature_key(
            processor=made.processor,
            content=content,
            io=io,
            options=merged_options(made.options, ref.options),
            salt=ref.salt,
        )

    async def _content(self, source: ItemSource, *, need_data: bool) -> str:
        """Return the content hash. With `need_data` a URL is fetched again."""
        expected, url = source.ref.content, source.ref.url
        if expected is not None and not (need_data and url is not None):
            return expected
        if is_leased(url):
            with self.leases.lookup(source.ref) as pin:
                return pin.value.content_hash
        with source.timeline.measure("fetch"):
            fetch = self._fetcher.fetch
            if self._published is not None and is_published(url or ""):
                fetch = self._published.fetch
            content = await fetch(source.ref, need_data=need_data)
        if expected not in (None, content):
            raise UnknownMedia("the content of the URL of this feature has changed: send its tensors or media")
        return content

    async def _stored(self, source: ItemSource, content: str) -> Pin[EncodedMedia] | None:
        """Return the bytes of `content`, received if needed. None if they have to be fetched."""
        if (pin := self._lookup(source.ref, content)) is not None:
            return pin
        if source.upload is not None:
            with source.timeline.measure("fetch"):
                return await source.upload(self._store)
        if source.ref.url is None:
            raise UnknownMediaUuid(_UNKNOWN)
        return None

    def _lookup(self, ref: MediaRef, content: str) -> Pin[EncodedMedia] | None:
        """Return the cached bytes of `content`. Raises UnknownMedia if they are leased no more."""
        return self.leases.lookup(ref) if is_leased(ref.url) else self._store.lookup(ref, content)

    def _held(self, ref: MediaRef, content: str) -> Pin[EncodedMedia]:
        """Pin the bytes of `content` for shared work, which may outlive its callers' pins. Raises ArenaFull if they
        were evicted."""
        if (pin := self._lookup(ref, content)) is None:
            raise ArenaFull(_TOO_SMALL)
        return pin

    async def _admit(self, source: ItemSource, encoded: EncodedMedia) -> None:
        """Ask whether the request may have an image of a URL; clients know the sizes of images that they send."""
        if source.ref.url is None or source.ref.modality != "image" or source.admit is None:
            return
        size = None if (page := source.ref.page) is None else (page.width, page.height)
        with suppress(InvalidRequest):  # decoding it will say why
            data = self._store.bytes(encoded)
            if encoded.media_type == PIXMAP_TYPE:
                size = pixmap_size(data)
            elif size is None:
                size = image_size(data, self._media)
        if size is not None:
            await source.admit(*size)

    async def _prepare_once(self, source: ItemSource, content: str, made: _Made, key: str) -> Pin[Feature]:
        """Prepare the requested form, which has this `key`, once for all concurrent requests."""
        if (message := self._too_large.get(key)) is not None:
            raise MediaTooLarge(message)
        work = partial(self._prepare, source.ref, content, made, key=key, timeline=source.timeline)
        return await self._preparing.do(key, work)

    async def _prepare(
        self, ref: MediaRef, content: str, made: _Made, *, key: str, timeline: RequestTimeline
    ) -> Pin[Feature]:
        """Prepare and publish the feature, or the decoded media, under `key`. The caller has a pin on the bytes."""
        with self._held(ref, content) as stored:
            merged = merged_options(made.options, ref.options) if isinstance(made, Processing) else None
            as_file = made == "file"
            try:
                prepared = await self._pool.prepare_item(stored, merged, key, timeline, io=ref.io, as_file=as_file)
            except MediaTooLarge as error:
                self._too_large[key] = error.message
                raise
            self._probed[_probe_key(stored.value, ref.salt)] = None
            timeline.copied_bytes += prepared.value.nbytes
            return prepared

    async def _probe(self, ref: MediaRef, encoded: EncodedMedia) -> None:
        """Open in a preparer what a worker will decode, once for all concurrent requests. The caller has a pin."""
        key = _probe_key(encoded, ref.salt)
        if ref.is_embeds or key in self._probed or not needs_probe(encoded.media_type):
            return
        await self._probing.do(key, lambda: self._probe_stored(ref, encoded.content_hash))
        self._probed[key] = None

    async def _probe_stored(self, ref: MediaRef, content: str) -> None:
        with self._held(ref, content) as stored:
            await self._pool.probe_item(stored)


def _probe_key(encoded: EncodedMedia, salt: str) -> str:
    """Return the cache key of a verdict on encoded bytes: content, modality and tenant."""
    return decoded_key(content=encoded.content_hash, io=encoded.modality.encode(), salt=salt)


def _size_key(ref: MediaRef, content: str) -> tuple[str, Modality]:
    return decoded_key(content=content, io=ref.io, salt=ref.salt), ref.modality


def _document_key(ref: MediaRef, content: str, options: DocumentOptions) -> str:
    return decoded_key(content=content, io=msgspec.json.encode(options), salt=ref.salt)


def _size_bytes(size: MediaSize) -> int:
    return _ENTRY_BYTES + len(size.metadata)


def _described_bytes(described: Described | None) -> int:
    return _ENTRY_BYTES if described is None else _size_bytes(described.size) + len(described.header)
