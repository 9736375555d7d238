"""From a media reference to leases on what the arena has of it: encoded bytes, decoded media, the feature.

What is missing is fetched, decoded and processed; what is there is taken. Encoded bytes are cached under their content,
so that other options, another stage, or a URL whose content is known to be what it was need neither a download nor a
copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal, NamedTuple

import msgspec
from cachetools import LRUCache

from medialane.arena import Arena, Lease
from medialane.core.errors import ArenaFull, InvalidRequest, MedialaneError, MediaTooLarge, UnknownMediaUuid
from medialane.core.feature import Feature
from medialane.core.flight import SingleFlight
from medialane.core.hashing import content_hash, decoded_key, feature_key, merged_options
from medialane.core.media import EncodedMedia, MediaRef
from medialane.gateway.aliases import Aliases
from medialane.gateway.encoded_store import EncodedStore
from medialane.gateway.loop_fairness import LoopFairness
from medialane.media import Fetched, Fetcher, MediaConfig, needs_probe
from medialane.observability.timeline import StageTimeline
from medialane.prepare import PreparerPool

#: Encoded bytes may be evicted between their download and their use when the arena is far too small; then they are
#: fetched again.
_MAX_ATTEMPTS = 3

#: Decode options in the key of an image whose JPEG may be decoded smaller (`jpeg_scaled_decode`); no client sets them.
SCALED_IO = b'{"jpeg_scaled_decode":true}'

#: Items whose verdict is remembered, of each kind.
_MAX_CACHED_VERDICTS = 16_384

_TOO_SMALL = "the shared memory is too small for the media of the requests in flight"

_UNKNOWN = "unknown or expired uuid: send the URL or data of the media as well"


class Found(NamedTuple):
    """What the arena has of one item: a lease on its feature or its decoded form, and the hash of what it is made of.

    `is_hit` tells whether it was there already.
    """

    content_hash: str
    lease: Lease[Feature]
    is_hit: bool


class _Form(NamedTuple):
    """What is wanted of an item: its feature, made with the request's `options`, or what its decoder gives."""

    kind: Literal["decoded", "processed"]
    options: bytes | None


class FeatureSource:
    """Gives leases on encoded media, on decoded ones and on features; at most one preparation of each runs at a time.

    The caller owns every lease that it is given. Errors name the reference's field of the request.
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
        self._scales = media.jpeg_scaled_decode
        self._fairness = fairness
        self._aliases = aliases
        self._making: SingleFlight[str, Lease[Feature]] = SingleFlight(share=Lease.duplicate, release=Lease.release)
        self._probing: SingleFlight[str, None] = SingleFlight()
        #: Content that a preparer has opened, or decoded, without an error: a worker may decode it.
        self._probed: LRUCache[str, None] = LRUCache(_MAX_CACHED_VERDICTS)
        #: Features that never fit the arena: finding that out again would take a preparer seconds each time.
        self._too_large: LRUCache[str, str] = LRUCache(_MAX_CACHED_VERDICTS)

    def known(self, ref: MediaRef) -> MediaRef:
        """`ref`, its content and options known where it is an alias alone. Raises UnknownMediaUuid."""
        if not ref.is_alias or ref.alias is None:
            return ref
        bound = self._aliases.find(ref.salt, ref.alias)
        if bound is None:
            raise UnknownMediaUuid(_UNKNOWN, param=ref.param)
        return msgspec.structs.replace(ref, content=bound.content, io=bound.io, options=bound.options)

    async def find(self, ref: MediaRef, options: bytes, timeline: StageTimeline) -> Found:
        """The feature of `ref`, processed with the request's `options` and its own."""
        return await self._find(ref, _Form("processed", options), timeline)

    async def decoded(self, ref: MediaRef, timeline: StageTimeline) -> Found:
        """What the decoder gives of `ref`."""
        return await self._find(ref, _Form("decoded", None), timeline)

    async def encoded(self, ref: MediaRef, timeline: StageTimeline) -> Lease[EncodedMedia]:
        """The encoded bytes that `ref` stands for now; their content hash is `value.content_hash`.

        A preparer has opened them where their header must be checked; what it refuses is not kept.
        """
        with _naming(ref):
            lease = await self._at_hand(ref, timeline)
            try:
                await self._probe(ref, lease.value)
            except BaseException as error:  # whatever ends it, nobody else has this lease
                lease.release()
                if isinstance(error, InvalidRequest):
                    self._store.forget(ref, lease.value.content_hash)
                raise
        self._bind(ref, lease.value.content_hash)
        return lease

    def key(self, ref: MediaRef, options: bytes, *, content: str) -> str:
        """What identifies the feature of `ref`, without making it. `content` is the hash of what it stands for."""
        return feature_key(
            processor=self._digest,
            content=content,
            io=ref.io,
            options=merged_options(options, ref.options),
            salt=ref.salt,
        )

    async def _find(self, ref: MediaRef, form: _Form, timeline: StageTimeline) -> Found:
        with _naming(ref):
            found = await self._found_or_made(ref, form, timeline)
        self._bind(ref, found.content_hash)
        return found

    async def _found_or_made(self, ref: MediaRef, form: _Form, timeline: StageTimeline) -> Found:
        """Look for what is wanted, and make it where it is not.

        A URL whose content is known by its hash alone may have other content by the time that its bytes are fetched:
        then that is what is looked up, and what the feature is made of and named after.
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
                # Held meanwhile: a flight that another request began finds the bytes for as long as anybody waits.
                with encoded or nullcontext():
                    return Found(content, await self._make(ref, fetched, form, timeline), is_hit=False)
            need_data = True
        raise ArenaFull(_TOO_SMALL)

    def _key(self, ref: MediaRef, form: _Form, content: str) -> str:
        if form.options is None:
            return decoded_key(content=content, io=ref.io, salt=ref.salt)
        scales = self._scales and ref.modality == "image"
        # What a worker makes of the whole image, under `key`, is another feature.
        scaled = msgspec.structs.replace(ref, io=SCALED_IO) if scales else ref
        return self.key(scaled, form.options, content=content)

    async def _make(self, ref: MediaRef, fetched: Fetched, form: _Form, timeline: StageTimeline) -> Lease[Feature]:
        """Prepare what is wanted, once for all who want it now."""
        key = self._key(ref, form, fetched.content_hash)
        if (message := self._too_large.get(key)) is not None:
            raise MediaTooLarge(message)
        return await self._making.do(key, lambda: self._prepare(ref, fetched, form=form, key=key, timeline=timeline))

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
        """Only content that could be used is worth a name."""
        if ref.alias is not None and not ref.is_alias:
            self._aliases.bind(ref.salt, ref.alias, content)

    async def _prepare(
        self, ref: MediaRef, fetched: Fetched, *, form: _Form, key: str, timeline: StageTimeline
    ) -> Lease[Feature]:
        """Publish the feature, or the decoded media, under `key`."""
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
        """Have a preparer open what a worker is about to decode, once for all who want it. The caller holds it."""
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

    async def _at_hand(self, ref: MediaRef, timeline: StageTimeline) -> Lease[EncodedMedia]:
        """The encoded bytes, fetched if need be."""
        for attempt in range(_MAX_ATTEMPTS):
            fetched = await self._fetch(ref, timeline, need_data=attempt > 0)
            if (lease := await self._encoded(ref, fetched, timeline)) is not None:
                return lease
        raise ArenaFull(_TOO_SMALL)

    async def _encoded(self, ref: MediaRef, fetched: Fetched, timeline: StageTimeline) -> Lease[EncodedMedia] | None:
        """The encoded bytes in the arena, cached there if they were not. None if they are not at hand either."""
        lease = self._store.lookup(ref, fetched.content_hash)
        if lease is not None or (data := fetched.data) is None:
            return lease
        async with self._fairness.step(len(data)):
            timeline.copied_bytes += len(data)
            return await self._store.put(ref, fetched.content_hash, data)


@contextmanager
def _naming(ref: MediaRef) -> Iterator[None]:
    """Errors name the field of the request that they are about."""
    try:
        yield
    except MedialaneError as error:
        raise error.at(ref.param) from error


def _probe_key(encoded: EncodedMedia, salt: str) -> str:
    """What a verdict on encoded bytes is kept under, the same content as another modality under another key."""
    return decoded_key(content=encoded.content_hash, io=encoded.modality.encode(), salt=salt)
