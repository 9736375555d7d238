"""From a media reference to a leased feature: fetched, decoded and processed only if the arena does not have it."""

from __future__ import annotations

from medialane.arena import ENTRY_HEADER_BYTES, Arena, Lease
from medialane.core.errors import ArenaFull, MedialaneError
from medialane.core.feature import Feature
from medialane.core.flight import SingleFlight
from medialane.core.hashing import feature_key
from medialane.core.media import EncodedMedia, MediaRef
from medialane.media import Fetched, Fetcher, MediaConfig
from medialane.media.sniff import sniff
from medialane.observability.timeline import StageTimeline
from medialane.prepare import PreparerPool

#: An entry may be evicted between its preparation and its use when the arena is far too small; then prepare again.
_TRIES = 3


class FeatureSource:
    """Gives leases on features; at most one preparation of a feature runs at a time."""

    def __init__(
        self, *, arena: Arena, pool: PreparerPool, fetcher: Fetcher, media: MediaConfig, processor_digest: str
    ) -> None:
        self._arena = arena
        self._pool = pool
        self._fetcher = fetcher
        self._media = media
        self._digest = processor_digest
        self._flights: SingleFlight[str, None] = SingleFlight()

    async def lease(self, ref: MediaRef, options: bytes, timeline: StageTimeline) -> Lease[Feature]:
        """The feature of `ref`. The caller owns the lease. Errors name the reference's field of the request."""
        fetched = await self._fetch(ref, timeline)
        key = self._key(fetched, ref, options)
        if (lease := self._arena.lookup(key)) is not None:
            timeline.num_hits += 1
            return lease
        timeline.num_misses += 1
        try:
            return await self._prepared(ref, fetched, options, key, timeline)
        except MedialaneError as error:
            raise error.at(ref.param) from error

    async def key(self, ref: MediaRef, options: bytes, timeline: StageTimeline) -> str:
        """What identifies the feature of `ref`, without making it."""
        return self._key(await self._fetch(ref, timeline), ref, options)

    async def encoded(self, ref: MediaRef, timeline: StageTimeline) -> bytes:
        """The reference's encoded bytes, for a worker that shall process them itself."""
        return bytes((await self._fetch(ref, timeline, need_data=True)).data or b"")

    def _key(self, fetched: Fetched, ref: MediaRef, options: bytes) -> str:
        return feature_key(processor=self._digest, content=fetched.content_hash, options=options, salt=ref.salt)

    async def _fetch(self, ref: MediaRef, timeline: StageTimeline, *, need_data: bool = False) -> Fetched:
        try:
            with timeline.measure("fetch"):
                return await self._fetcher.fetch(ref, need_data=need_data)
        except MedialaneError as error:
            raise error.at(ref.param) from error

    async def _prepared(
        self, ref: MediaRef, fetched: Fetched, options: bytes, key: str, timeline: StageTimeline
    ) -> Lease[Feature]:
        for _ in range(_TRIES):
            await self._flights.do(key, lambda: self._prepare(ref, fetched, options, key, timeline))
            if (lease := self._arena.lookup(key)) is not None:
                return lease
        raise ArenaFull("the arena is too small for the media of the requests under way")

    async def _prepare(
        self, ref: MediaRef, fetched: Fetched, options: bytes, key: str, timeline: StageTimeline
    ) -> None:
        """Publish the feature of `key`. A URL whose content was known by its hash alone is fetched now."""
        if fetched.data is None:
            fetched = await self._fetch(ref, timeline, need_data=True)
        with self._store(ref, fetched) as encoded:
            prepared = await self._pool.prepare_item(encoded, options, key, timeline)
            timeline.copied_bytes += encoded.value.num_bytes + prepared.value.nbytes
        prepared.release()

    def _store(self, ref: MediaRef, fetched: Fetched) -> Lease[EncodedMedia]:
        """The encoded bytes in the arena, where preparers read them."""
        data = fetched.data or b""
        sniffed = sniff(data, self._media)
        reservation = self._arena.reserve(len(data))
        reservation.buffer[: len(data)] = data
        encoded = EncodedMedia(
            ref.modality, fetched.content_hash, sniffed.media_type, reservation.range, ENTRY_HEADER_BYTES, len(data)
        )
        return self._arena.keep(reservation, encoded)
