"""From a media reference to leases on what the arena has of it: encoded bytes, and the feature made of them.

What is missing is fetched, decoded and processed; what is there is taken. Encoded bytes are cached under their content,
so that other options, another stage, or a URL whose content is known to be what it was need neither a download nor a
copy.
"""

from __future__ import annotations

from contextlib import nullcontext

import msgspec
from blake3 import blake3

from medialane.arena import ENTRY_HEADER_BYTES, Arena, Lease
from medialane.core.errors import ArenaFull, MedialaneError
from medialane.core.feature import Feature
from medialane.core.flight import SingleFlight
from medialane.core.hashing import content_hash, feature_key, merged_options
from medialane.core.media import EncodedMedia, MediaRef
from medialane.gateway.turns import Turns
from medialane.media import Fetched, Fetcher, MediaConfig, sniff
from medialane.observability.timeline import StageTimeline
from medialane.prepare import PreparerPool

#: An entry may be evicted between its making and its use when the arena is far too small; then it is made again.
_TRIES = 3

_TOO_SMALL = "the arena is too small for the media of the requests under way"


class FeatureSource:
    """Gives leases on encoded media and on features; at most one preparation of a feature runs at a time."""

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
        """The feature of `ref`, processed with the request's `options` and its own.

        The caller owns the lease. Errors name the reference's field of the request.
        """
        try:
            return await self._lease(ref, options, timeline)
        except MedialaneError as error:
            raise error.at(ref.param) from error

    async def encoded(self, ref: MediaRef, timeline: StageTimeline) -> Lease[EncodedMedia]:
        """The encoded bytes that `ref` stands for now; their content hash is `value.content_hash`.

        The caller owns the lease. Errors name the reference's field of the request.
        """
        try:
            need_data = False
            for _ in range(_TRIES):
                fetched = await self._fetch(ref, timeline, need_data=need_data)
                if (lease := await self._encoded(ref, fetched, timeline)) is not None:
                    return lease
                need_data = True
            raise ArenaFull(_TOO_SMALL)
        except MedialaneError as error:
            raise error.at(ref.param) from error

    async def load(self, ref: MediaRef, timeline: StageTimeline) -> MediaRef:
        """`ref` with the bytes that it stands for now. Errors name its field of the request."""
        if ref.data is not None:
            return ref
        with await self.encoded(ref, timeline) as encoded:
            return msgspec.structs.replace(ref, url=None, data=bytes(encoded_bytes(self._arena, encoded.value)))

    def key(self, ref: MediaRef, options: bytes, *, content: str | None = None) -> str:
        """What identifies the feature of `ref`, without making it.

        `content` is the hash of what it stands for; without it, that of the reference's own bytes is computed.
        """
        return feature_key(
            processor=self._digest,
            content=content_hash(ref.data or b"") if content is None else content,
            io=ref.io,
            options=merged_options(options, ref.options),
            salt=ref.salt,
        )

    async def _lease(self, ref: MediaRef, options: bytes, timeline: StageTimeline) -> Lease[Feature]:
        """As `lease`.

        A URL whose content is known by its hash alone may have other content by the time that its bytes are fetched:
        then that is what is looked up, and what the feature is made of and named after.
        """
        need_data = missed = False
        for _ in range(1 + _TRIES):
            fetched = await self._fetch(ref, timeline, need_data=need_data)
            key = self.key(ref, options, content=fetched.content_hash)
            if (lease := self._arena.lookup(key)) is not None:
                timeline.num_hits += not missed
                return lease
            # Held while it waits: a flight that another request began finds the bytes for as long as anybody waits.
            encoded = self._arena.lookup(_encoded_key(fetched.content_hash, ref), "encoded")
            need_data = encoded is None and fetched.data is None
            if need_data:
                continue
            timeline.num_misses += not missed
            missed = True
            with encoded or nullcontext():
                await self._make(ref, fetched, options, key, timeline)
                if (lease := self._arena.lookup(key)) is not None:
                    return lease
        raise ArenaFull(_TOO_SMALL)

    async def _make(self, ref: MediaRef, fetched: Fetched, options: bytes, key: str, timeline: StageTimeline) -> None:
        """Publish the feature of `key`, once for all who want it now."""
        await self._flights.do(key, lambda: self._prepare(ref, fetched, options, key, timeline))

    async def _fetch(self, ref: MediaRef, timeline: StageTimeline, *, need_data: bool = False) -> Fetched:
        with timeline.measure("fetch"):
            if (data := ref.data) is not None:  # bytes of the request are only hashed
                return Fetched(await self._turns.run(len(data), lambda: content_hash(data)), data)
            return await self._fetcher.fetch(ref, need_data=need_data)

    async def _prepare(
        self, ref: MediaRef, fetched: Fetched, options: bytes, key: str, timeline: StageTimeline
    ) -> None:
        """Publish the feature of `key`."""
        stored = await self._encoded(ref, fetched, timeline)
        if stored is None:
            raise ArenaFull(_TOO_SMALL)
        with stored as encoded:
            options = merged_options(options, ref.options)
            prepared = await self._pool.prepare_item(encoded, options, key, timeline, io=ref.io)
            timeline.copied_bytes += prepared.value.nbytes
        prepared.release()

    async def _encoded(self, ref: MediaRef, fetched: Fetched, timeline: StageTimeline) -> Lease[EncodedMedia] | None:
        """The encoded bytes in the arena, cached there if they were not. None if they are not at hand either."""
        if (lease := self._cached(ref, fetched)) is not None:
            return lease
        if (data := fetched.data) is None:
            return None
        async with self._turns.step(len(data)):
            if (lease := self._cached(ref, fetched)) is None:
                lease = self._store(ref, fetched.content_hash, data)
                timeline.copied_bytes += len(data)
        return lease

    def _cached(self, ref: MediaRef, fetched: Fetched) -> Lease[EncodedMedia] | None:
        """The cached encoded bytes, described for the modality of `ref`: a video's bytes may be wanted as sound, too.

        Raises what `sniff` raises.
        """
        lease = self._arena.lookup(_encoded_key(fetched.content_hash, ref), "encoded")
        if lease is None or lease.value.modality == ref.modality:
            return lease
        try:
            media_type = sniff(encoded_bytes(self._arena, lease.value), ref.modality, self._media)
        except BaseException:
            lease.release()
            raise
        lease.value = msgspec.structs.replace(lease.value, modality=ref.modality, media_type=media_type)
        return lease

    def _store(self, ref: MediaRef, content: str, data: bytes | bytearray) -> Lease[EncodedMedia]:
        """A copy of the bytes in the arena, cached. Raises what `sniff` raises, and ArenaFull."""
        media_type = sniff(data, ref.modality, self._media)
        reservation = self._arena.reserve(len(data), "encoded")
        reservation.buffer[:] = data
        encoded = EncodedMedia(ref.modality, content, media_type, reservation.range, ENTRY_HEADER_BYTES, len(data))
        return self._arena.publish(reservation, _encoded_key(content, ref), encoded)


def encoded_bytes(arena: Arena, encoded: EncodedMedia) -> memoryview:
    """The bytes of an entry that the caller has a lease on, read-only."""
    first = encoded.data_offset
    return arena.view.entry(encoded.range)[first : first + encoded.num_bytes]


def _encoded_key(content: str, ref: MediaRef) -> str:
    """Where encoded bytes are cached: under their content hash, among the tenant's own."""
    return content if not ref.salt else blake3(msgspec.msgpack.encode((content, ref.salt))).hexdigest()
