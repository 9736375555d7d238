"""Leases on encoded bytes that a client has sent once (`core.media_lease`): the table, its bounds, and its ends.

A lease pins the entry of its bytes in the arena, so that they are not evicted, until it expires or is deleted. It
belongs to an owner: the tenant (`--keys`) or the API key with which the bytes were sent, and, if they were sent with a
`cache_salt`, to requests with that salt. To all others there is no such lease.

Leases are kept in records of the arena's file, written before the answer that relies on them: the next store that takes
the file over pins their entries before it evicts anything. Times are of the clock that all processes of the host share
(`core.name_records.boot_time`).

Each lease counts as one, and with its bytes, also if several have one entry. Uploads count from their beginning. The
leases of a store, and of a tenant, have a share of the arena's bytes and of its entries.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import msgspec
from blake3 import blake3

from medialane.arena import Arena, Lease
from medialane.core.errors import InvalidRequest, MediaLeasesFull, MediaTooLarge, UnknownMedia
from medialane.core.media import EncodedMedia, Modality
from medialane.core.media_lease import TENANT, LeasedMedia
from medialane.core.name_records import NOT_KEPT, NameRecords, boot_time
from medialane.core.retry_after import retry_after
from medialane.core.stats import MediaLeaseStats
from medialane.store.config import StoreConfig

logger = logging.getLogger(__name__)

#: Most leases of a store; a record of each is in the arena's file.
MAX_LEASES = 65_536

UNKNOWN = "unknown or expired media: send them again (PUT /medialane/v1/media)"


class MediaDescription(NamedTuple):
    """What is known of leased media."""

    modality: Modality
    media_type: str
    width: int = 0
    height: int = 0
    duration_s: float = 0.0


class _Owner(NamedTuple):
    """Whose a lease is: the hash of its name, and whether its share is limited."""

    digest: bytes
    is_tenant: bool

    @classmethod
    def of(cls, name: str) -> _Owner:
        return cls(blake3(name.encode()).digest(), name.startswith(TENANT))


class _Record(NamedTuple):
    """In the arena's file. `entry` is the key of its entry."""

    media: bytes
    owner: _Owner
    entry: bytes
    described: MediaDescription
    expires_at: float


class _Leased(NamedTuple):
    record: _Record
    entry: Lease[EncodedMedia]

    @property
    def num_bytes(self) -> int:
        return self.entry.value.num_bytes


class _Bounds:
    """How many leases and uploads there are, with how many bytes, and may be, each by an owner of which a tenant has
    `tenant_share`. `until_next` returns when the next lease ends, in s."""

    def __init__(
        self, *, max_bytes: int, max_items: int, tenant_share: float, until_next: Callable[[], int | None]
    ) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._num_items = 0
        self._max_items = max_items
        self._max_tenant_bytes = int(max_bytes * tenant_share)
        self._max_tenant_items = int(max_items * tenant_share)
        self._until_next = until_next
        self._bytes_of: Counter[bytes] = Counter()
        self._items_of: Counter[bytes] = Counter()

    def check(self, owner: _Owner, more_bytes: int, *, item_bytes: int) -> None:
        """Raise MediaLeasesFull if `more_bytes` exceed the bounds, or the items that are counted do; MediaTooLarge if
        the item always would."""
        most = self._max_tenant_bytes if owner.is_tenant else self.max_bytes
        if item_bytes > most:
            message = f"the media have {item_bytes} bytes or more; what this server keeps of a client may have {most}"
            raise MediaTooLarge(message)
        if owner.is_tenant:
            self._check_share(owner, more_bytes)
        if self.num_bytes + more_bytes > self.max_bytes or self._num_items > self._max_items:
            message = "the memory for media that are kept for clients is full"
            raise MediaLeasesFull(message, retry_after_s=self._until_next())

    def _check_share(self, owner: _Owner, more_bytes: int) -> None:
        own, delete = "the media that are kept for this API key would", "delete some (DELETE /medialane/v1/media/HASH)"
        if self._bytes_of[owner.digest] + more_bytes > self._max_tenant_bytes:
            raise MediaLeasesFull(f"{own} have more than {self._max_tenant_bytes} bytes: {delete}")
        if self._items_of[owner.digest] > self._max_tenant_items:
            raise MediaLeasesFull(f"{own} be more than {self._max_tenant_items}: {delete}")

    def free_bytes(self, owner: _Owner) -> int:
        """Return how many more bytes an owner's media may have."""
        free = self.max_bytes - self.num_bytes
        return min(free, self._max_tenant_bytes - self._bytes_of[owner.digest]) if owner.is_tenant else free

    def count(self, owner: _Owner, num_bytes: int, *, num_items: int = 0) -> None:
        self.num_bytes += num_bytes
        self._num_items += num_items
        for counted, more in ((self._bytes_of, num_bytes), (self._items_of, num_items)):
            counted[owner.digest] += more
            if not counted[owner.digest]:
                del counted[owner.digest]


class Upload:
    """What one upload counts for, among the leases of its owner."""

    def __init__(self, bounds: _Bounds, owner: _Owner) -> None:
        self._bounds = bounds
        self._owner = owner
        self._num_bytes = 0

    @property
    def most_bytes(self) -> int:
        """What it may count for at the moment."""
        return self._num_bytes + self._bounds.free_bytes(self._owner)

    def set(self, num_bytes: int) -> None:
        """Count so many bytes instead of those before. Raises MediaLeasesFull, MediaTooLarge."""
        more_bytes = num_bytes - self._num_bytes
        if more_bytes > 0:
            self._bounds.check(self._owner, more_bytes, item_bytes=num_bytes)
        self._bounds.count(self._owner, more_bytes)
        self._num_bytes = num_bytes


class MediaLeases:
    """The leases of one store, which lives on an event loop: they end there when they expire. `close` once; records
    stay for the next store."""

    def __init__(
        self,
        arena: Arena,
        config: StoreConfig,
        *,
        clock: Callable[[], float] = boot_time,
        records: NameRecords = NOT_KEPT,
    ) -> None:
        """Take over the leases in `records`."""
        self._arena = arena
        self._max_ttl_s = config.media_lease_ttl_s
        max_bytes = int(arena.size_bytes * config.media_lease_share)
        self._bounds = _Bounds(
            max_bytes=max_bytes,
            max_items=min(MAX_LEASES, int(arena.max_entries * config.media_lease_share)),
            tenant_share=config.media_lease_tenant_share,
            until_next=self._until_next,
        )
        self._clock = clock
        self._records = records
        self._leased: dict[bytes, _Leased] = {}
        #: When leases expire; a renewed one has several, of which the last counts.
        self._expiries: list[tuple[float, bytes]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._restore()

    @property
    def stats(self) -> MediaLeaseStats:
        return MediaLeaseStats(len(self._leased), self._bounds.num_bytes, self._bounds.max_bytes)

    def ttl(self, wanted_s: float | None) -> float:
        """Return how long a lease lasts for a request that wants this. Raises InvalidRequest."""
        if wanted_s is None:
            return self._max_ttl_s
        if not 0 < wanted_s <= self._max_ttl_s:
            raise InvalidRequest(f"ttl must be positive and at most {self._max_ttl_s:g} seconds", param="ttl")
        return wanted_s

    @contextmanager
    def upload(self, owner: str) -> Iterator[Upload]:
        """Count what an owner is sending, while the block lasts. Raises MediaLeasesFull."""
        own = _Owner.of(owner)
        upload = Upload(self._bounds, own)
        self._bounds.count(own, 0, num_items=1)
        try:
            self._bounds.check(own, 0, item_bytes=0)
            yield upload
        finally:
            self._bounds.count(own, 0, num_items=-1)
            upload.set(0)

    def add(
        self, entry: Lease[EncodedMedia], described: MediaDescription, *, media: str, owner: str, key: str, ttl_s: float
    ) -> LeasedMedia:
        """Lease the bytes of `entry`, whose key is `key`, under the hash `media`; one of this hash is renewed. Owns the
        lease of the arena from now on. Raises MediaLeasesFull, MediaTooLarge."""
        own = _Owner.of(owner)
        name = _name(own, media)
        record = _Record(bytes.fromhex(media), own, bytes.fromhex(key), described, self._clock() + ttl_s)
        if (leased := self._leased.get(name)) is not None:
            entry.release()
            return self._put(name, leased._replace(record=record))
        self._take(record, entry)
        return self._put(name, _Leased(record, entry))

    def find(self, owner: str, media: str) -> LeasedMedia:
        """Raises UnknownMedia."""
        return self._shown(self._found(owner, media)[1])

    def renew(self, owner: str, media: str, ttl_s: float) -> LeasedMedia:
        """Have a lease end so much later than now. Raises UnknownMedia."""
        name, leased = self._found(owner, media)
        record = leased.record._replace(expires_at=self._clock() + ttl_s)
        return self._put(name, leased._replace(record=record))

    def end(self, owner: str, media: str) -> LeasedMedia:
        """End a lease. Raises UnknownMedia."""
        name, leased = self._found(owner, media)
        self._end(name)
        return self._shown(leased)

    def entry(self, owner: str, media: str) -> Lease[EncodedMedia]:
        """Return a lease on the entry of leased media. The caller owns it. Raises UnknownMedia."""
        return self._found(owner, media)[1].entry.duplicate()

    def close(self) -> None:
        """Release all entries. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._leased:
            self._leased.popitem()[1].entry.release()

    def _found(self, owner: str, media: str) -> tuple[bytes, _Leased]:
        self._expire()
        name = _name(_Owner.of(owner), media)
        if (leased := self._leased.get(name)) is None:
            raise UnknownMedia(UNKNOWN)
        return name, leased

    def _shown(self, leased: _Leased) -> LeasedMedia:
        record, described = leased.record, leased.record.described
        return LeasedMedia(
            record.media.hex(),
            described.modality,
            described.media_type,
            leased.num_bytes,
            max(0.0, record.expires_at - self._clock()),
            described.width,
            described.height,
            described.duration_s,
        )

    def _put(self, name: bytes, leased: _Leased) -> LeasedMedia:
        self._records.write(name, msgspec.msgpack.encode(leased.record))
        self._leased[name] = leased
        heapq.heappush(self._expiries, (leased.record.expires_at, name))
        if len(self._expiries) > 2 * len(self._leased) + 64:  # of renewals
            self._expiries = [(each.record.expires_at, name) for name, each in self._leased.items()]
            heapq.heapify(self._expiries)
        self._schedule()
        return self._shown(leased)

    def _take(self, record: _Record, entry: Lease[EncodedMedia]) -> None:
        """Count a lease, or release its entry. Raises MediaLeasesFull, MediaTooLarge."""
        num_bytes = entry.value.num_bytes
        try:
            self._bounds.check(record.owner, num_bytes, item_bytes=num_bytes)
        except (MediaLeasesFull, MediaTooLarge):
            entry.release()
            raise
        self._bounds.count(record.owner, num_bytes, num_items=1)

    def _end(self, name: bytes) -> None:
        self._records.erase(name)
        leased = self._leased.pop(name)
        self._bounds.count(leased.record.owner, -leased.num_bytes, num_items=-1)
        leased.entry.release()

    def _expire(self) -> None:
        now = self._clock()
        while self._expiries and self._expiries[0][0] <= now:
            expires_at, name = heapq.heappop(self._expiries)
            leased = self._leased.get(name)
            if leased is not None and leased.record.expires_at == expires_at:
                self._end(name)

    def _until_next(self) -> int | None:
        if not self._expiries:
            return None
        return retry_after(self._expiries[0][0] - self._clock())

    def _schedule(self) -> None:
        """Look again when the first lease may have expired."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._expiries:
            wait_s = max(0.0, self._expiries[0][0] - self._clock())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._on_expiry)

    def _on_expiry(self) -> None:
        self._timer = None
        self._expire()
        self._schedule()

    def _restore(self) -> None:
        """Take the leases of an earlier store; those that end last go first, as far as the bounds allow."""
        now = self._clock()
        kept = [(name, msgspec.msgpack.decode(payload, type=_Record)) for name, payload in self._records.read()]
        for name, record in sorted(kept, key=lambda one: -one[1].expires_at):
            entry = self._arena.lookup(record.entry.hex(), "encoded") if record.expires_at > now else None
            try:
                if entry is None:
                    raise UnknownMedia(UNKNOWN)
                self._take(record, entry)
            except (UnknownMedia, MediaLeasesFull, MediaTooLarge):
                self._records.erase(name)
                continue
            self._put(name, _Leased(record._replace(expires_at=min(record.expires_at, now + self._max_ttl_s)), entry))
        if kept:
            logger.info("%d of %d leases on clients' media are taken over", len(self._leased), len(kept))


def _name(owner: _Owner, media: str) -> bytes:
    return blake3(owner.digest + media.encode()).digest()
