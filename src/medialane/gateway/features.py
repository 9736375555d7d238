"""From a media reference to a leased feature: fetched, decoded and processed only if the arena does not have it."""

from __future__ import annotations

import msgspec

from medialane.arena import ENTRY_HEADER_BYTES, Arena, Lease
from medialane.core.errors import ArenaFull, MedialaneError
from medialane.core.feature import Feature
from medialane.core.flight import SingleFlight
from medialane.core.hashing import content_hash, feature_key
from medialane.core.media import EncodedMedia, MediaRef
from medialane.gateway.turns import Turns
from medialane.media import Fetched, Fetcher, MediaConfig, sniff
from medialane.observability.timeline import StageTimeline
from medialane.prepare import PreparerPool

#: An entry may be evicted between its preparation and its use when the arena is far too small; then prepare again.
_TRIES = 3


class FeatureSource:
    """Gives leases on features; at most one preparation of a feature runs at a time."""

    def __init__(
        self,
        *,
        arena: Arena,
        pool: PreparerPool,
        fetcher: Fetcher,
        media: MediaConfig,
        processor_digest: str,
        turns: Turns,
    ) -> None:
        self._arena = arena
        self._pool = pool
        self._fetcher = fetcher
        self._media = media
        self._digest = processor_digest
        self._turns = turns
        self._flights: SingleFlight[str, None] = SingleFlight()

    async def lease(self, ref: MediaRef, options: bytes, timeline: StageTimeline) -> Lease[Feature]:
        """The feature of `ref`. The caller owns the lease. Errors name the reference's field of the request."""
        try:
            found = await self._lookup(ref, options, timeline)
            if isinstance(found, Lease):
                timeline.num_hits += 1
                return found
            timeline.num_misses += 1
            return await self._prepared(ref, found, options, timeline)
        except MedialaneError as error:
            raise error.at(ref.param) from error

    async def load(self, ref: MediaRef, timeline: StageTimeline) -> MediaRef:
        """`ref` with the bytes that it stands for now. Errors name its field of the request."""
        if ref.data is not None:
            return ref
        try:
            content = await self._fetch(ref, timeline, need_data=True)
        except MedialaneError as error:
            raise error.at(ref.param) from error
        return msgspec.structs.replace(ref, url=None, data=bytes(content.data or b""))

    def key(self, ref: MediaRef, options: bytes) -> str:
        """What identifies the feature of a loaded reference, without making it."""
        return self._key(content_hash(ref.data or b""), ref, options)

    def _key(self, content: str, ref: MediaRef, options: bytes) -> str:
        return feature_key(processor=self._digest, content=content, options=options, salt=ref.salt)

    async def _lookup(self, ref: MediaRef, options: bytes, timeline: StageTimeline) -> Lease[Feature] | Fetched:
        """A lease if the arena has the feature, else the content with its bytes.

        A URL whose content is known by its hash alone may have other content by the time that its bytes are fetched:
        then that is what is looked up, and what the feature is made of and named after.
        """
        fetched = await self._fetch(ref, timeline)
        lease = self._arena.lookup(self._key(fetched.content_hash, ref, options))
        if lease is None and fetched.data is None:
            fetched = await self._fetch(ref, timeline, need_data=True)
            lease = self._arena.lookup(self._key(fetched.content_hash, ref, options))
        return fetched if lease is None else lease

    async def _fetch(self, ref: MediaRef, timeline: StageTimeline, *, need_data: bool = False) -> Fetched:
        with timeline.measure("fetch"):
            if (data := ref.data) is not None:  # bytes of the request are only hashed
                return Fetched(await self._turns.run(len(data), lambda: content_hash(data)), data)
            return await self._fetcher.fetch(ref, need_data=need_data)

    async def _prepared(
        self, ref: MediaRef, fetched: Fetched, options: bytes, timeline: StageTimeline
    ) -> Lease[Feature]:
        key = self._key(fetched.content_hash, ref, options)
        for _ in range(_TRIES):
            await self._flights.do(key, lambda: self._prepare(ref, fetched, options, key, timeline))
            if (lease := self._arena.lookup(key)) is not None:
                return lease
        raise ArenaFull("the arena is too small for the media of the requests under way")

    async def _prepare(
        self, ref: MediaRef, fetched: Fetched, options: bytes, key: str, timeline: StageTimeline
    ) -> None:
        """Publish the feature of `key`."""
        async with self._turns.step(len(fetched.data or b"")):
            stored = self._store(ref, fetched)
        with stored as encoded:
            prepared = await self._pool.prepare_item(encoded, options, key, timeline)
            timeline.copied_bytes += encoded.value.num_bytes + prepared.value.nbytes
        prepared.release()

    def _store(self, ref: MediaRef, fetched: Fetched) -> Lease[EncodedMedia]:
        """The encoded bytes in the arena, where preparers read them."""
        data = fetched.data or b""
        media_type = sniff(data, ref.modality, self._media)
        reservation = self._arena.reserve(len(data))
        reservation.buffer[: len(data)] = data
        encoded = EncodedMedia(
            ref.modality, fetched.content_hash, media_type, reservation.range, ENTRY_HEADER_BYTES, len(data)
        )
        return self._arena.keep(reservation, encoded)
