"""Resolves a media reference to leases on arena entries: encoded bytes, decoded media, or the feature.

Entries that are missing are fetched, decoded and processed. Encoded bytes are cached by content hash, so other options,
another stage, or a URL known to be unchanged need neither a download nor a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Literal, NamedTuple

import msgspec
from cachetools import LRUCache

from medialane.arena import Arena, Lease
from medialane.core.errors import (
    ArenaFull,
    InvalidRequest,
    MedialaneError,
    MediaTooLarge,
    PromptTooLong,
    UnknownMediaUuid,
)
from medialane.core.feature import Feature
from medialane.core.flight import SingleFlight
from medialane.core.hashing import content_hash, decoded_key, feature_key, merged_options
from medialane.core.media import EncodedMedia, MediaRef
from medialane.gateway.aliases import Aliases
from medialane.gateway.encoded_store import EncodedStore
from medialane.gateway.image_budget import ImageBudget
from medialane.gateway.loop_fairness import LoopFairness
from medialane.media import Fetched, Fetcher, MediaConfig, image_size, needs_probe
from medialane.observability.timeline import StageTimeline
from medialane.prepare import PreparerPool

#: Encoded bytes may be evicted between download and use if the arena is far too small; then they are fetched again.
_MAX_ATTEMPTS = 3

#: Decode options in the key of a JPEG that may be decoded at reduced size (`jpeg_scaled_decode`); no client sets them.
SCALED_IO = b'{"jpeg_scaled_decode":true}'

#: Size of each cache of verdicts (probed, too large), in items.
_MAX_CACHED_VERDICTS = 16_384

_TOO_SMALL = "the shared memory is too small for the media of the requests in flight"

_UNKNOWN = "unknown or expired uuid: send the URL or data of the media as well"


class Found(NamedTuple):
    """A lease on an item's feature or decoded form, and the hash of its encoded bytes.

    `is_hit` is whether it was cached.
    """

    content_hash: str
    lease: Lease[Feature]
    is_hit: bool


class _Form(NamedTuple):
    """The requested form of an item: its feature, processed with the request's `options`, or its decoder's output."""

    kind: Literal["decoded", "processed"]
    options: bytes | None


class FeatureSource:
    """Returns leases on encoded media, decoded media and features; concurrent preparations of the same key are shared.

    The caller owns every lease that is returned. Errors name the request field of the reference.
    """

    def __init__(
        self,
        *,
        arena: Arena,
        pool: PreparerPool,
        fetcher: Fetcher,
        media: MediaConfig,
        processor_digest: str,
        fairness: LoopFairness,
        aliases: Aliases,
    ) -> None:
        self._arena = arena
        self._pool = pool
        self._fetcher = fetcher
        self._store = EncodedStore(arena, media)
        self._digest = processor_digest
        self._media = media
        self._scales = media.jpeg_scaled_decode
        self._fairness = fairness
        self._aliases = aliases
        self._preparing: SingleFlight[str, Lease[Feature]] = SingleFlight(share=Lease.duplicate, release=Lease.release)
        self._probing: SingleFlight[str, None] = SingleFlight()
        #: Content that a preparer has opened or decoded without an error: a worker may decode it.
        self._probed: LRUCache[str, None] = LRUCache(_MAX_CACHED_VERDICTS)
        #: Features that cannot fit into the arena: finding out again would cost a preparer seconds each time.
        self._too_large: LRUCache[str, str] = LRUCache(_MAX_CACHED_VERDICTS)

    def known(self, ref: MediaRef) -> MediaRef:
        """Return `ref`, with the content and options of its alias if it has nothing else. Raises UnknownMediaUuid."""
        if not ref.is_alias or ref.alias is None:
            return ref
        bound = self._aliases.find(ref.salt, ref.alias)
        if bound is None:
            raise UnknownMediaUuid(_UNKNOWN, param=ref.param)
        return msgspec.structs.replace(ref, content=bound.content, io=bound.io, options=bound.options)

    async def find(self, ref: MediaRef, options: bytes, timeline: StageTimeline, budget: ImageBudget) -> Found:
        """Return the feature of `ref`, processed with the options of the request and of `ref`.

        An image that is not cached is counted in `budget` before it is decoded.
        """
        return await self._find(ref, _Form("processed", options), timeline, budget)

    async def decoded(self, ref: MediaRef, timeline: StageTimeline, budget: ImageBudget) -> Found:
        """Return the decoder's output for `ref`. `budget` is as in `find`."""
        return await self._find(ref, _Form("decoded", None), timeline, budget)

    async def encoded(self, ref: MediaRef, timeline: StageTimeline, budget: ImageBudget) -> Lease[EncodedMedia]:
        """Return the current encoded bytes of `ref`; their content hash is `value.content_hash`.

        An image is counted in `budget`. If their header must be checked, a preparer has opened them; bytes that it
        rejects are dropped from the cache.
        """
        with _naming(ref):
            lease = await self._fetch_encoded(ref, timeline)
            try:
                await self._count(ref, lease.value, budget)
                await self._probe(ref, lease.value)
            except BaseException as error:  # cancellation included: the lease has no other owner
                lease.release()
                if isinstance(error, InvalidRequest) and not isinstance(error, PromptTooLong):
                    self._store.forget(ref, lease.value.content_hash)
                raise
        self._bind(ref, lease.value.content_hash)
        return lease

    def key(self, ref: MediaRef, options: bytes, *, content: str) -> str:
        """Return the feature key of `ref`, without preparing it. `content` is its content hash."""
        return feature_key(
            processor=self._digest,
            content=content,
            io=ref.io,
            options=merged_options(options, ref.options),
            salt=ref.salt,
        )

    async def count_sent(self, ref: MediaRef, budget: ImageBudget) -> None:
        """Count an image that came with the request in `budget`."""
        with _naming(ref):
            await self._count(ref, ref.data, budget)

    async def _count(self, ref: MediaRef, source: EncodedMedia | bytes | bytearray | None, budget: ImageBudget) -> None:
        if source is None or ref.modality != "image" or ref.is_embeds or budget.has_counted(ref):
            return
        if (size := await self._image_size(source)) is not None:
            await budget.add(ref, *size)

    async def _find(self, ref: MediaRef, form: _Form, timeline: StageTimeline, budget: ImageBudget) -> Found:
        with _naming(ref):
            found = await self._find_or_prepare(ref, form, timeline, budget)
        self._bind(ref, found.content_hash)
        return found

    async def _find_or_prepare(self, ref: MediaRef, form: _Form, timeline: StageTimeline, budget: ImageBudget) -> Found:
        """Look up the requested form, and prepare it if it is missing.

        If only the content hash of a URL is known, its content may have changed when its bytes are fetched: then the
        new content is looked up, and the feature is made from it and has its key.
        """
        need_data = False
        for _ in range(1 + _MAX_ATTEMPTS):
            fetched = await self._fetch(ref, timeline, need_data=need_data)
            content = fetched.content_hash
            if (lease := self._arena.lookup(self._key(ref, form, content), form.kind)) is not None:
                timeline.num_hits += 1
                return Found(content, lease, is_hit=True)
            encoded = self._store.lookup(ref, content)
            if encoded is not None or fetched.data is not None:
                timeline.num_misses += 1
                # Every waiting request pins the bytes, so they outlive the request that started the shared preparation.
                with encoded or nullcontext():
                    await self._count(ref, fetched.data if encoded is None else encoded.value, budget)
                    self._check_fits(ref, form, budget)
                    return Found(content, await self._prepare_once(ref, fetched, form, timeline), is_hit=False)
            need_data = True
        raise ArenaFull(_TOO_SMALL)

    async def _image_size(self, source: EncodedMedia | bytes | bytearray) -> tuple[int, int] | None:
        """Return (width, height) of an image from its header; None if it is invalid: storing the bytes raises why."""
        data = self._store.bytes(source) if isinstance(source, EncodedMedia) else source
        async with self._fairness.step(len(data)):
            with suppress(InvalidRequest):
                return image_size(data, self._media)
        return None

    def _check_fits(self, ref: MediaRef, form: _Form, budget: ImageBudget) -> None:
        """Raise MediaTooLarge if the image's size implies that it can never be stored once it is prepared."""
        num_bytes = budget.decoded_bytes(ref) if form.kind == "decoded" else budget.processed_bytes(ref)
        if num_bytes > self._arena.max_payload_bytes:
            raise MediaTooLarge(f"the item takes {num_bytes} bytes once prepared, more than this server can store")

    def _key(self, ref: MediaRef, form: _Form, content: str) -> str:
        if form.options is None:
            return decoded_key(content=content, io=ref.io, salt=ref.salt)
        scales = self._scales and ref.modality == "image"
        # The feature that a worker makes of the full-size image (`key`) is a different one.
        scaled = msgspec.structs.replace(ref, io=SCALED_IO) if scales else ref
        return self.key(scaled, form.options, content=content)

    async def _prepare_once(
        self, ref: MediaRef, fetched: Fetched, form: _Form, timeline: StageTimeline
    ) -> Lease[Feature]:
        """Prepare the requested form, once for all concurrent requests."""
        key = self._key(ref, form, fetched.content_hash)
        if (message := self._too_large.get(key)) is not None:
            raise MediaTooLarge(message)
        return await self._preparing.do(key, lambda: self._prepare(ref, fetched, form=form, key=key, timeline=timeline))

    async def _fetch(self, ref: MediaRef, timeline: StageTimeline, *, need_data: bool = False) -> Fetched:
        with timeline.measure("fetch"):
            if (data := ref.data) is not None:  # bytes of the request are only hashed
                return Fetched(await self._fairness.run(len(data), lambda: content_hash(data)), data)
            if not ref.is_alias:
                return await self._fetcher.fetch(ref, need_data=need_data)
            if need_data or ref.content is None:
                raise UnknownMediaUuid(_UNKNOWN)
            return Fetched(ref.content, None)

    def _bind(self, ref: MediaRef, content: str) -> None:
        """Bind the alias. Called only after the content has proved usable."""
        if ref.alias is not None and not ref.is_alias:
            self._aliases.bind(ref.salt, ref.alias, content)

    async def _prepare(
        self, ref: MediaRef, fetched: Fetched, *, form: _Form, key: str, timeline: StageTimeline
    ) -> Lease[Feature]:
        """Prepare and publish the feature, or the decoded media, under `key`."""
        stored = await self._encoded(ref, fetched, timeline)
        if stored is None:
            raise ArenaFull(_TOO_SMALL)
        with stored:
            merged = None if form.options is None else merged_options(form.options, ref.options)
            try:
                prepared = await self._pool.prepare_item(stored, merged, key, timeline, io=ref.io)
            except MediaTooLarge as error:
                self._too_large[key] = error.message
                raise
            self._probed[_probe_key(stored.value, ref.salt)] = None
            timeline.copied_bytes += prepared.value.nbytes
            return prepared

    async def _probe(self, ref: MediaRef, encoded: EncodedMedia) -> None:
        """Open in a preparer what a worker will decode, once for all concurrent requests. The caller has a lease."""
        key = _probe_key(encoded, ref.salt)
        if ref.is_embeds or key in self._probed or not needs_probe(encoded.media_type):
            return
        await self._probing.do(key, lambda: self._probe_stored(ref, encoded.content_hash))
        self._probed[key] = None

    async def _probe_stored(self, ref: MediaRef, content: str) -> None:
        if (stored := self._store.lookup(ref, content)) is None:
            raise ArenaFull(_TOO_SMALL)
        with stored:
            await self._pool.probe_item(stored)

    async def _fetch_encoded(self, ref: MediaRef, timeline: StageTimeline) -> Lease[EncodedMedia]:
        """Return the encoded bytes, fetched if they are not cached."""
        for attempt in range(_MAX_ATTEMPTS):
            fetched = await self._fetch(ref, timeline, need_data=attempt > 0)
            if (lease := await self._encoded(ref, fetched, timeline)) is not None:
                return lease
        raise ArenaFull(_TOO_SMALL)

    async def _encoded(self, ref: MediaRef, fetched: Fetched, timeline: StageTimeline) -> Lease[EncodedMedia] | None:
        """Return the encoded bytes in the arena, stored there if needed. None if `fetched` has no bytes to store."""
        lease = self._store.lookup(ref, fetched.content_hash)
        if lease is not None or (data := fetched.data) is None:
            return lease
        async with self._fairness.step(len(data)):
            timeline.copied_bytes += len(data)
            return await self._store.put(ref, fetched.content_hash, data)


@contextmanager
def _naming(ref: MediaRef) -> Iterator[None]:
    """Add the request field of `ref` to errors."""
    try:
        yield
    except MedialaneError as error:
        raise error.at(ref.param) from error


def _probe_key(encoded: EncodedMedia, salt: str) -> str:
    """Return the cache key of a verdict on encoded bytes: content, modality and tenant."""
    return decoded_key(content=encoded.content_hash, io=encoded.modality.encode(), salt=salt)
