"""Receives media that a client sends to be leased: a gateway writes them into the arena as they arrive.

A range of the declared length is reserved, or, without one, ranges of `STEPS` in turn, between which the gateway copies
what it has written. All of it counts in the bounds of leases from the beginning, so that uploads that do not end take
no memory from requests.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec

from medialane.arena import Lease, Reservation
from medialane.core.errors import (
    ErrorReport,
    InvalidRequest,
    InvalidUpload,
    MediaTooLarge,
    UnknownMedia,
    UnsupportedMediaType,
    UuidConflict,
    from_report,
    to_report,
)
from medialane.core.hashing import owner_salt
from medialane.core.media import EncodedMedia, MediaRef, MediaSize, Modality
from medialane.core.media_lease import LeasedMedia, leased_hash, media_hash
from medialane.core.modalities import MODALITIES
from medialane.media import MediaConfig, oriented_size, sniff
from medialane.prepare import PreparerPool
from medialane.store.aliases import Aliases
from medialane.store.encoded_store import EncodedStore
from medialane.store.media_leases import UNKNOWN, MediaDescription, MediaLeases, Upload
from medialane.store.messages import AskLease, PutMedia, Written

MIB = 1 << 20

#: Sizes reserved for media of an undeclared length; then the most that they may have.
STEPS = (MIB, 4 * MIB, 16 * MIB, 64 * MIB)

#: Has the client write to a range, after what it has written to the one before. The caller owns the range before and
#: after that; if this raises, it has ended.
Write = Callable[[Reservation], Awaitable[Written]]


class MediaUploads:
    """Makes leases of what clients send."""

    def __init__(
        self,
        store: EncodedStore,
        leases: MediaLeases,
        *,
        aliases: Aliases,
        pool: PreparerPool,
        config: MediaConfig,
    ) -> None:
        self._store = store
        self._leases = leases
        self._aliases = aliases
        self._pool = pool
        self._config = config

    async def receive(
        self, call: PutMedia, reserve: Callable[[int], Awaitable[Reservation]], write: Write
    ) -> LeasedMedia:
        """Receive the media into ranges of `reserve`, and lease them.

        Raises InvalidRequest (ttl), MediaLeasesFull, MediaTooLarge, InvalidUpload, UuidConflict, and what `sniff` and
        preparers raise, ArenaFull what `reserve` raises.
        """
        ttl_s = self._leases.ttl(call.ttl_s)
        with self._leases.upload(call.owner) as upload:
            reservation, content = await self._received(call, upload, reserve, write)
            with reservation:
                modality, media_type = sniffed(reservation.buffer, call.modality, self._config)
                entry = self._store.publish_as(
                    reservation, modality=modality, salt=call.salt, content=content, media_type=media_type
                )
            try:
                described = await self._described(entry)
                if call.alias is not None:
                    alias = msgspec.structs.replace(call.alias, kind=modality)
                    self._aliases.bind(call.salt, alias, content)
            except BaseException as error:  # cancellation included: the lease has no other owner
                entry.release()
                if isinstance(error, InvalidRequest) and not isinstance(error, UuidConflict):
                    self._store.forget(content, call.salt)
                raise
            upload.set(0)  # the lease counts from now on
            return self._leases.add(
                entry,
                described,
                media=media_hash(owner=call.owner, salt=call.salt, content=content),
                owner=call.owner,
                key=self._store.key(content, call.salt),
                ttl_s=ttl_s,
            )

    def ask(self, call: AskLease) -> LeasedMedia:
        """Find, renew or end a lease. Raises UnknownMedia, InvalidRequest (ttl)."""
        self._entry(call.owner, call.salt, call.media).release()
        if call.action == "find":
            return self._leases.find(call.owner, call.media)
        if call.action == "end":
            return self._leases.end(call.owner, call.media)
        return self._leases.renew(call.owner, call.media, self._leases.ttl(call.ttl_s))

    def lookup(self, ref: MediaRef) -> Lease[EncodedMedia]:
        """Return a lease on the bytes of a reference to leased media, for its modality. The caller owns it. Raises
        UnknownMedia, and what `sniff` raises."""
        found = self._store.described(self._entry(ref.owner, ref.salt, leased_hash(ref.url or "")), ref)
        if found is None:
            raise UnknownMedia(UNKNOWN)
        return found

    def _entry(self, owner: str, salt: str, media: str) -> Lease[EncodedMedia]:
        """Return a lease on the bytes of this hash, if they were sent with this salt or without one (with that of their
        owner alone). The caller owns it. Raises UnknownMedia."""
        entry = self._leases.entry(owner, media)
        content, salts = entry.value.content_hash, {"", owner_salt(owner, ""), salt}
        if media not in (media_hash(owner=owner, salt=own, content=content) for own in salts):
            entry.release()
            raise UnknownMedia(UNKNOWN)
        return entry

    async def _received(
        self, call: PutMedia, upload: Upload, reserve: Callable[[int], Awaitable[Reservation]], write: Write
    ) -> tuple[Reservation, str]:
        """Return the range with the media, which the caller owns, and their content hash."""
        most = self._max_bytes(call.modality)
        if call.num_bytes > most:
            raise MediaTooLarge(f"the media have {call.num_bytes} bytes, more than {most}")
        reservation: Reservation | None = None
        size = 0
        for step in [call.num_bytes] if call.num_bytes else [*(step for step in STEPS if step < most), most]:
            try:
                size = step if call.num_bytes else max(size + 1, min(step, upload.most_bytes))
                upload.set(size)
                larger = await reserve(size)
                written = await write(larger)
            finally:
                if reservation is not None:
                    reservation.abandon()
            reservation = larger
            if written.num_bytes is not None:
                if written.num_bytes < size:
                    reservation.trim(written.num_bytes)
                upload.set(written.num_bytes)
                return reservation, written.content
        if reservation is not None:
            reservation.abandon()
        raise MediaTooLarge(f"the media have more than {most} bytes")

    def _max_bytes(self, modality: Modality | None) -> int:
        return max(
            self._config.fetch_limits(each).max_bytes for each in MODALITIES if modality is None or each == modality
        )

    async def _described(self, entry: Lease[EncodedMedia]) -> MediaDescription:
        """Open the media in a preparer, unless their size is in a header that has been checked. Raises InvalidRequest
        for damaged ones."""
        encoded = entry.value
        size = oriented_size(self._store.bytes(encoded), self._config) if encoded.modality == "image" else None
        if size is None:
            size = MediaSize()
            with suppress(UnsupportedMediaType):  # without the model's processor nothing samples videos
                size = await self._pool.measure(entry)
        return MediaDescription(encoded.modality, encoded.media_type, size.width, size.height, _duration_s(size))


def sniffed(data: memoryview, declared: Modality | None, config: MediaConfig) -> tuple[Modality, str]:
    """Return the modality and media type of encoded bytes, whose modality may be declared. Raises what `sniff` raises,
    InvalidUpload for bytes that no modality recognises."""
    if declared is not None:
        return declared, sniff(data, declared, config)
    own: list[ErrorReport] = []  # of modalities whose magic bytes they have, or none; an exception would keep the bytes
    for modality in MODALITIES:
        try:
            return modality, sniff(data, modality, config)
        except UnsupportedMediaType:
            continue
        except InvalidRequest as error:
            own.append(to_report(error))
    if len(own) == 1:
        raise from_report(own[0])
    message = "the body is not an image, a video or audio of a type that this server supports"
    raise InvalidUpload(f"{message}, or it is damaged") if own else UnsupportedMediaType(message)


def _duration_s(size: MediaSize) -> float:
    if size.num_samples and size.sample_rate:
        return size.num_samples / size.sample_rate
    if not size.metadata:
        return 0.0
    with suppress(msgspec.DecodeError):
        duration = msgspec.json.decode(size.metadata, type=dict[str, object]).get("duration")
        if isinstance(duration, int | float) and math.isfinite(duration):
            return max(0.0, float(duration))
    return 0.0
