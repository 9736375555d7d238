"""From a media reference to a leased feature: fetched, decoded and processed only if the arena does not have it."""

from __future__ import annotations

from dataclasses import dataclass

from medialane.arena import Arena, Lease
from medialane.core.errors import ArenaFull, MedialaneError
from medialane.core.feature import Feature
from medialane.core.flight import SingleFlight
from medialane.core.hashing import content_hash, feature_key
from medialane.core.media import EncodedMedia, MediaRef
from medialane.media import Fetcher, MediaConfig, sniff
from medialane.observability.timeline import StageTimeline
from medialane.prepare import PreparerPool

#: An entry may be evicted between its preparation and its use when the arena is far too small; then prepare again.
_TRIES = 3


@dataclass(frozen=True, slots=True)
class Content:
    """What a reference leads to. `data` is None when a URL's bytes are known by their hash alone."""

    hash: str
    data: bytes | bytearray | None


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
        try:
            return await self._lease(ref, options, timeline)
        except MedialaneError as error:
            if error.param is not None:
                raise
            raise error.at(ref.param) from error

    async def content(self, ref: MediaRef, timeline: StageTimeline) -> Content:
        """The reference's content hash, and its bytes where they had to be fetched."""
        if ref.data is not None:
            return Content(content_hash(ref.data), ref.data)
        with timeline.measure("fetch"):
            return await self._fetch(ref, need_data=False)

    async def encoded(self, ref: MediaRef) -> bytes:
        """The reference's encoded bytes, for a worker that shall process them itself."""
        data = ref.data if ref.data is not None else (await self._fetch(ref, need_data=True)).data
        return bytes(data or b"")

    def key(self, content: str, options: bytes, salt: str) -> str:
        return feature_key(processor=self._digest, content=content, options=options, salt=salt)

    async def _lease(self, ref: MediaRef, options: bytes, timeline: StageTimeline) -> Lease[Feature]:
        content = await self.content(ref, timeline)
        key = self.key(content.hash, options, ref.salt)
        if (lease := self._arena.lookup(key)) is not None:
            timeline.num_hits += 1
            return lease
        timeline.num_misses += 1
        for _ in range(_TRIES):
            await self._flights.do(key, lambda: self._prepare(ref, content, options, key, timeline))
            if (lease := self._arena.lookup(key)) is not None:
                return lease
        raise ArenaFull("the arena is too small for the media of the requests under way")

    async def _prepare(
        self, ref: MediaRef, content: Content, options: bytes, key: str, timeline: StageTimeline
    ) -> None:
        data = content.data if content.data is not None else (await self._fetch(ref, need_data=True)).data
        with self._store(ref, content.hash, data or b"") as encoded:
            prepared = await self._pool.prepare_item(encoded, options, key, timeline)
        timeline.copied_bytes += len(data or b"") + prepared.value.nbytes
        prepared.release()

    def _store(self, ref: MediaRef, hash_: str, data: bytes | bytearray) -> Lease[EncodedMedia]:
        sniffed = sniff(data, self._media)
        reservation = self._arena.reserve(len(data))
        reservation.buffer[: len(data)] = data
        encoded = EncodedMedia(ref.modality, hash_, sniffed.media_type, reservation.range, 64, len(data))
        return self._arena.keep(reservation, encoded)

    async def _fetch(self, ref: MediaRef, *, need_data: bool) -> Content:
        raise NotImplementedError
