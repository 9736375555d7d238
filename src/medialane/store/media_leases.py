"""Media that clients send once (`types.media_lease`): received into the arena, leased, and found by later requests.

A gateway writes them as they arrive: to a range of the declared length or, without one, to ranges of `STEPS` in turn,
between which it copies. The lease then pins the entry of their bytes, which requests with the same media may share,
until it expires or is deleted.

The hash of media says whose they are: it is made of their content, their owner (the tenant of `--keys`, or the API key)
and the `cache_salt` with which they were sent. To whoever cannot make the same hash there is no such lease.

Leases are kept in records of the arena's file, written before the answer that relies on them: the next store that takes
the file over pins their entries before it evicts anything. Times are of the clock that all processes of the host share
(`media.http_cache.boot_time`).

Each lease counts as one, and with its bytes, also if several have one entry; uploads count from their beginning, so
that unfinished ones take no memory from requests. All of a store, and of a tenant, have a share of the arena's
bytes and of its entries.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

import msgspec

from medialane.arena import Arena, Pin, Reservation
from medialane.media import MediaConfig, is_pdf, needs_probe, oriented_size, sniff
from medialane.media.http_cache import NOT_KEPT, NameRecords, boot_time
from medialane.prepare import PreparerPool
from medialane.store.config import StoreConfig
from medialane.store.encoded_store import EncodedStore
from medialane.store.messages import AskLease, Proceed, PutMedia
from medialane.store.names import Aliases
from medialane.types.errors import (
    ErrorReport,
    InvalidRequest,
    InvalidUpload,
    MediaLeasesFull,
    MediaTooLarge,
    UnknownMedia,
    UnsupportedMediaType,
    UuidConflict,
    from_report,
    retry_after,
    to_report,
)
from medialane.types.hashing import owner_salt
from medialane.types.media import MODALITIES, TEXT_TYPE, EncodedMedia, MediaRef, MediaSize, MediaSource, source_of
from medialane.types.media_lease import LeasedMedia, TenantShares, leased_hash, media_hash, tenant_of
from medialane.types.stats import MediaLeaseStats

logger = logging.getLogger(__name__)

#: Most leases of a store; a record of each is in the arena's file.
MAX_LEASES = 65_536

MIB = 1 << 20

#: Sizes reserved for media of an undeclared length; then the most that they may have.
STEPS = (MIB, 4 * MIB, 16 * MIB, 64 * MIB)

#: What is tried for media whose modality is not declared.
_SOURCES: tuple[MediaSource, ...] = (*MODALITIES, "document")

#: Has the client write to a new range of this size, after what it has written to the one before. The caller owns it.
Write = Callable[[int], Awaitable[tuple[Reservation, Proceed]]]

_UNKNOWN = "unknown or expired media: send them again (PUT /medialane/v1/media)"


class _Record(NamedTuple):
    """In the arena's file, by the hash of the media. `entry` is the key of their entry; the time that remains of
    `media` is of no meaning here."""

    tenant: bytes
    entry: bytes
    media: LeasedMedia
    expires_at: float


class _VideoMetadata(msgspec.Struct):
    duration: float = 0.0


class _Leased(NamedTuple):
    """`file` is what a client has said of a file: its name is too long for the records of the arena's file."""

    record: _Record
    entry: Pin[EncodedMedia]
    timer: asyncio.TimerHandle
    file: PutMedia | None


class MediaLeases:
    """The leases of one store, which lives on an event loop: they end there when they expire. `close` once; records
    stay for the next store."""

    def __init__(
        self,
        arena: Arena,
        config: StoreConfig,
        media: MediaConfig,
        *,
        aliases: Aliases,
        pool: PreparerPool,
        clock: Callable[[], float] = boot_time,
        records: NameRecords = NOT_KEPT,
        max_leases: int = MAX_LEASES,
    ) -> None:
        """Take over the leases in `records`."""
        self._arena = arena
        self._store = EncodedStore(arena, media)
        self._media = media
        self._aliases = aliases
        self._pool = pool
        self._max_ttl_s = config.media_lease_ttl_s
        share, tenant_share = config.media_lease_share, config.media_lease_tenant_share
        self._bytes = TenantShares(int(arena.size_bytes * share), tenant_share=tenant_share)
        self._items = TenantShares(min(max_leases, int(arena.max_entries * share)), tenant_share=tenant_share)
        self._clock = clock
        self._records = records
        self._leased: dict[str, _Leased] = {}
        self._restore()

    @property
    def stats(self) -> MediaLeaseStats:
        return MediaLeaseStats(len(self._leased), self._bytes.used, self._bytes.most)

    async def receive(self, call: PutMedia, write: Write) -> LeasedMedia:
        """Receive media, and lease them; leases that exist already are renewed.

        Raises InvalidRequest (ttl), MediaLeasesFull, MediaTooLarge, InvalidUpload, UuidConflict, and what `sniff` and
        preparers and `write` raise.
        """
        ttl_s, tenant = self._ttl(call.ttl_s), tenant_of(call.owner)
        with self._uploading(tenant) as resize:
            reservation, content = await self._received(call, resize, write)
            with reservation:
                source, media_type = sniffed(reservation.buffer, call.modality, self._media)
                entry = self._store.publish(reservation, source, salt=call.salt, content=content, media_type=media_type)
            try:
                media = await self._described(entry, call)
                if call.alias is not None:
                    self._aliases.bind(call.salt, msgspec.structs.replace(call.alias, kind=source), content)
            except BaseException as error:  # cancellation included: the pin has no other owner
                entry.release()
                if isinstance(error, InvalidRequest) and not isinstance(error, UuidConflict):
                    self._store.forget(content, call.salt)
                raise
        key = bytes.fromhex(self._store.key(content, call.salt))
        return self._add(_Record(tenant, key, media, self._clock() + ttl_s), entry, call if call.purpose else None)

    def ask(self, call: AskLease) -> list[LeasedMedia]:
        """Find, renew or end a lease, or find all on files that the request may use. Raises UnknownMedia,
        InvalidRequest (ttl)."""
        if call.media is None:
            leases, salts = self._leased.values(), _salts(call.owner, call.salt)
            return [
                self._shown(each)
                for each in leases
                if (file := each.file) is not None and file.owner == call.owner and file.salt in salts
            ]
        leased = self._found(call.owner, call.salt, call.media)
        if call.action == "renew":
            record = leased.record._replace(expires_at=self._clock() + self._ttl(call.ttl_s))
            return [self._put(record, leased.entry, leased.file)]
        if call.action == "end":
            self._end(call.media)
        return [self._shown(leased)]

    def lookup(self, ref: MediaRef) -> Pin[EncodedMedia]:
        """Return a pin on the bytes of a reference to leased media, for its modality. The caller owns it. Raises
        UnknownMedia, and what `sniff` raises."""
        entry = self._found(ref.owner, ref.salt, leased_hash(ref.url or "")).entry
        if (found := self._store.described(entry.duplicate(), ref)) is None:
            raise UnknownMedia(_UNKNOWN)
        return found

    def close(self) -> None:
        """Release all entries. Idempotent."""
        while self._leased:
            _, leased = self._leased.popitem()
            leased.timer.cancel()
            leased.entry.release()

    def _ttl(self, wanted_s: float | None) -> float:
        if wanted_s is None:
            return self._max_ttl_s
        if not 0 < wanted_s <= self._max_ttl_s:
            raise InvalidRequest(f"ttl must be positive and at most {self._max_ttl_s:g} seconds", param="ttl")
        return wanted_s

    @contextmanager
    def _uploading(self, tenant: bytes) -> Iterator[Callable[[int], None]]:
        """Count what is being sent, while the block lasts; call what this yields with its size. Both raise
        MediaLeasesFull."""
        size = 0

        def resize(num_bytes: int) -> None:
            nonlocal size
            self._count(tenant, num_bytes - size)
            size = num_bytes

        self._count(tenant, 0, num_items=1)
        try:
            yield resize
        finally:
            self._count(tenant, -size, num_items=-1)

    def _count(self, tenant: bytes, more_bytes: int, *, num_items: int = 0) -> None:
        """Count more, or less. Raises MediaLeasesFull."""
        counts = (self._bytes, more_bytes, " bytes"), (self._items, num_items, "")
        for shares, more, unit in counts:
            if tenant and 0 < more > shares.free_of(tenant):
                message = f"the media that are kept for this API key would be more than {shares.most_of(tenant)}{unit}"
                raise MediaLeasesFull(f"{message}: delete some (DELETE /medialane/v1/media/HASH)")
            if 0 < more > shares.free:
                message = "the memory for media that are kept for clients is full"
                interval_s = self._max_ttl_s / max(1, len(self._leased))  # between the ends of leases, at most
                raise MediaLeasesFull(message, retry_after_s=retry_after(interval_s))
        for shares, more, _ in counts:
            shares.add(tenant, more)

    async def _received(self, call: PutMedia, resize: Callable[[int], None], write: Write) -> tuple[Reservation, str]:
        """Return the range with the media, which the caller owns, and their content hash."""
        tenant = tenant_of(call.owner)
        limits = [self._media.fetch_limits(m).max_bytes for m in _SOURCES if call.modality in (None, m)]
        most = min(max(limits), self._bytes.most_of(tenant))
        too_large = f"the media have more than {most} bytes, the most that this server keeps of one item of this client"
        if call.num_bytes > most:
            raise MediaTooLarge(too_large)
        steps, size = [call.num_bytes] if call.num_bytes else [*(step for step in STEPS if step < most), most], 0
        with ExitStack() as earlier:
            for step in steps:
                free = min(self._bytes.free, self._bytes.free_of(tenant))
                size = step if call.num_bytes else min(step, size + max(1, free))
                resize(size)
                reservation, answer = await write(size)
                earlier.close()
                if answer.num_bytes is not None:
                    if answer.num_bytes < size:
                        reservation.trim(answer.num_bytes)
                    resize(answer.num_bytes)
                    return reservation, answer.content
                earlier.push(reservation)
        raise MediaTooLarge(too_large)

    async def _described(self, entry: Pin[EncodedMedia], call: PutMedia) -> LeasedMedia:
        """Open the media in a preparer, unless their size is in a header that has been checked. Raises InvalidRequest
        for damaged ones."""
        encoded, source = entry.value, source_of(entry.value)
        size = oriented_size(self._store.bytes(encoded), self._media) if source == "image" else None
        if size is None:
            size = MediaSize()
            with suppress(UnsupportedMediaType):  # without the model's processor nothing samples videos
                if source != "document":
                    size = await self._pool.measure(entry)
                elif needs_probe(encoded.media_type):
                    await self._pool.probe_item(entry)
        return LeasedMedia(
            media_hash(owner=call.owner, salt=call.salt, content=encoded.content_hash),
            source,
            encoded.media_type,
            encoded.num_bytes,
            width=size.width,
            height=size.height,
            duration_s=_duration_s(size),
            created_at=round(time.time(), 3),
        )

    def _found(self, owner: str, salt: str, media: str) -> _Leased:
        """Return the lease of this hash if it is the owner's, and the media were sent with this salt, or without one.
        Raises UnknownMedia."""
        if (leased := self._leased.get(media)) is None:
            raise UnknownMedia(_UNKNOWN)
        content = leased.entry.value.content_hash
        if media not in (media_hash(owner=owner, salt=sent, content=content) for sent in _salts(owner, salt)):
            raise UnknownMedia(_UNKNOWN)
        if leased.record.expires_at <= self._clock():
            self._end(media)
            raise UnknownMedia(_UNKNOWN)
        return leased

    def _shown(self, leased: _Leased) -> LeasedMedia:
        record, _, _, file = leased
        remaining_s = max(0.0, record.expires_at - self._clock())
        media = msgspec.structs.replace(record.media, remaining_s=remaining_s)
        return media if file is None else msgspec.structs.replace(media, name=file.name, purpose=file.purpose)

    def _add(self, record: _Record, entry: Pin[EncodedMedia], file: PutMedia | None = None) -> LeasedMedia:
        """Lease an entry, or renew the lease on these media. Owns the pin from now on. Raises
        MediaLeasesFull."""
        if (earlier := self._leased.get(record.media.hash)) is not None:
            entry.release()
            return self._put(record, earlier.entry, file or earlier.file)
        try:
            self._count(record.tenant, record.media.num_bytes, num_items=1)
        except MediaLeasesFull:
            entry.release()
            raise
        return self._put(record, entry, file)

    def _put(self, record: _Record, entry: Pin[EncodedMedia], file: PutMedia | None) -> LeasedMedia:
        media = record.media.hash
        self._records.write(bytes.fromhex(media), msgspec.msgpack.encode(record))
        if (earlier := self._leased.get(media)) is not None:
            earlier.timer.cancel()
        timer = asyncio.get_running_loop().call_later(record.expires_at - self._clock(), self._end, media)
        self._leased[media] = _Leased(record, entry, timer, file)
        return self._shown(self._leased[media])

    def _end(self, media: str) -> None:
        self._records.erase(bytes.fromhex(media))
        record, entry, timer, _ = self._leased.pop(media)
        timer.cancel()
        self._count(record.tenant, -record.media.num_bytes, num_items=-1)
        entry.release()

    def _restore(self) -> None:
        """Take over the leases of an earlier store; the latest to end go first, as far as the bounds allow."""
        now = self._clock()
        kept = [(name, msgspec.msgpack.decode(payload, type=_Record)) for name, payload in self._records.read()]
        for name, record in sorted(kept, key=lambda one: -one[1].expires_at):
            entry = self._arena.lookup(record.entry.hex(), "encoded") if record.expires_at > now else None
            if entry is not None:
                record = record._replace(expires_at=min(record.expires_at, now + self._max_ttl_s))
                with suppress(MediaLeasesFull):
                    self._add(record, entry)
            if record.media.hash not in self._leased:
                self._records.erase(name)
        if kept:
            logger.info("%d of %d leases on clients' media are taken over", len(self._leased), len(kept))


def _salts(owner: str, salt: str) -> tuple[str, str, str]:
    """Return the salts with which media were sent that an owner's requests with this salt may use: media that were sent
    without a salt have only their owner's, or none."""
    return "", owner_salt(owner, ""), salt


def sniffed(data: memoryview, declared: MediaSource | None, config: MediaConfig) -> tuple[MediaSource, str]:
    """Return the modality and media type of encoded bytes, whose modality may be declared. Raises what `sniff` raises,
    InvalidUpload for bytes that no modality recognises."""
    if declared == "document" and not is_pdf(data):  # the gateway has looked: a text
        return declared, TEXT_TYPE
    if declared is not None:
        return declared, sniff(data, declared, config)
    own: list[ErrorReport] = []  # of modalities whose magic bytes they have, or none; an exception would keep the bytes
    for source in _SOURCES:
        try:
            return source, sniff(data, source, config)
        except UnsupportedMediaType:
            continue
        except InvalidRequest as error:
            own.append(to_report(error))
    if len(own) == 1:
        raise from_report(own[0])
    message = "the body is not an image, a video, audio or a PDF document of a type that this server supports"
    raise InvalidUpload(f"{message}, or it is damaged") if own else UnsupportedMediaType(message)


def _duration_s(size: MediaSize) -> float:
    if size.sample_rate:
        return size.num_samples / size.sample_rate
    with suppress(msgspec.DecodeError):
        return max(0.0, msgspec.json.decode(size.metadata or b"{}", type=_VideoMetadata).duration)
    return 0.0
