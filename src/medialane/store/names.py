"""What clients may name instead of sending it again: media by a name that they chose (`Aliases`: vLLM's `uuid`), and
features by their hash (`KnownFeatures`). Pure: clock and records are injected.

A chosen name is bound, per client's key and tenant (`cache_salt`, or none), to the hash of the content that was sent
with it first, until it expires: nobody else can make it name other content meanwhile. It is not a cache key: if a
request has both a name and content, the name never affects which content is used.

The hash of a feature is in reports and spans, so knowing it is no right to the feature: a client may name the features
of its own requests, by the reference's owner and the request's `cache_salt`; the operator, on this host, may name all.
With each is kept what it was made of, so that it can be made again; nothing here keeps media or tensors in the arena.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from blake3 import blake3
from cachetools import LRUCache

from medialane.media.http_cache import NOT_KEPT, NameRecords, boot_time
from medialane.types.errors import UuidConflict
from medialane.types.media import Alias, MediaRef
from medialane.types.media_lease import TenantLru, tenant_of

#: Of all records of features; one has about 600 bytes.
MAX_BYTES = 32 << 20

_RECORD_BYTES = 600

#: A feature of a longer URL is made again only as long as its encoded bytes are cached.
MAX_URL_CHARS = 4096


class AliasTarget(NamedTuple):
    """The content hash, and the item options that were given with the name."""

    content: str
    io: bytes
    options: bytes


class _Bound(NamedTuple):
    target: AliasTarget
    expires_at: float
    tenant: bytes = b""


class Aliases:
    """An LRU cache with a share per tenant; names expire after `ttl_s` seconds without use. They are kept in
    `records` and taken from there; the `clock` must be shared with the process which has written them."""

    def __init__(
        self,
        *,
        max_aliases: int,
        ttl_s: float,
        tenant_share: float = 1.0,
        clock: Callable[[], float] = boot_time,
        records: NameRecords = NOT_KEPT,
    ) -> None:
        self._max_aliases = max_aliases
        self._ttl_s = ttl_s
        self._clock = clock
        self._records = records
        self._bound: TenantLru[_Bound] = TenantLru(
            max_aliases, tenant_share=tenant_share, clock=clock, on_forget=records.erase
        )
        self._restore()

    def __len__(self) -> int:
        return len(self._bound)

    def bind(self, salt: str, alias: Alias, content: str) -> None:
        """Bind the name to this content and to the options given now. Raises UuidConflict if it is bound to other
        content."""
        if not self._max_aliases:
            return
        key = _key(alias.owner, salt, alias.kind, alias.uuid)
        if (bound := self._bound.get(key)) is not None and bound.target.content != content:
            raise UuidConflict("this uuid is in use for other content: choose another one")
        self._use(key, AliasTarget(content, alias.io, alias.options), tenant_of(alias.owner))

    def find(self, salt: str, alias: Alias) -> AliasTarget | None:
        """Return what the name is bound to, or None. Options given with the name now override the ones it is bound
        to."""
        key = _key(alias.owner, salt, alias.kind, alias.uuid)
        if (bound := self._bound.get(key)) is None:
            return None
        target = bound.target
        self._use(key, target, bound.tenant)
        return target._replace(
            io=target.io if alias.io == b"{}" else alias.io,
            options=target.options if alias.options == b"{}" else alias.options,
        )

    def _use(self, key: bytes, target: AliasTarget, tenant: bytes) -> None:
        """Let the name expire later."""
        bound = _Bound(target, self._clock() + self._ttl_s, tenant)
        self._put(key, bound)  # first, so that there is a free record
        self._records.write(key, msgspec.msgpack.encode(bound))

    def _put(self, key: bytes, bound: _Bound) -> None:
        self._bound.put(key, bound, expires_at=bound.expires_at, tenant=bound.tenant)

    def _restore(self) -> None:
        """Take the names of an earlier process; what exceeds the settings of this one is forgotten."""
        latest = self._clock() + self._ttl_s
        kept = [(key, msgspec.msgpack.decode(payload, type=_Bound)) for key, payload in self._records.read()]
        for key, bound in sorted(kept, key=lambda one: one[1].expires_at):
            self._put(key, bound._replace(expires_at=min(bound.expires_at, latest)))


class FeatureSource(msgspec.Struct, frozen=True):
    """What a feature was made of: `ref` has the content hash, and the URL if there was one; `options` are the merged
    options of request and item, `processor` is the digest of the processor's settings."""

    ref: MediaRef
    options: bytes
    processor: str

    @property
    def nbytes(self) -> int:
        return _RECORD_BYTES + len(self.ref.url or "") + len(self.ref.io) + len(self.options)


class KnownFeature(msgspec.Struct, frozen=True):
    """`source` is None for a feature whose tensors a client has sent: it cannot be made again."""

    source: FeatureSource | None


class KnownFeatures:
    """An LRU cache of at most `max_bytes`, with a share per tenant; records expire `ttl_s` seconds after their
    last use."""

    def __init__(
        self,
        *,
        ttl_s: float = 3600.0,
        max_bytes: int = MAX_BYTES,
        tenant_share: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._known: TenantLru[KnownFeature] = TenantLru(max_bytes, tenant_share=tenant_share, clock=clock)
        #: The key of the client that has used a feature last, by hash.
        self._newest: LRUCache[str, bytes] = LRUCache(max(1, max_bytes // _RECORD_BYTES))

    def remember(self, mm_hash: str, of: MediaRef, source: FeatureSource | None = None) -> None:
        """The client of the reference may name this feature. A known source is kept."""
        key = _key(of.owner, of.salt, mm_hash)
        if source is not None and len(source.ref.url or "") > MAX_URL_CHARS:
            source = msgspec.structs.replace(source, ref=msgspec.structs.replace(source.ref, url=None))
        if source is None and (known := self._find(key)) is not None:
            source = known.source
        num_bytes = _RECORD_BYTES if source is None else source.nbytes
        expires_at = self._clock() + self._ttl_s
        self._known.put(key, KnownFeature(source), expires_at=expires_at, tenant=tenant_of(of.owner), size=num_bytes)
        self._newest[mm_hash] = key

    def find(self, ref: MediaRef) -> KnownFeature | None:
        """Return what is known of the feature that the client of `ref` names, None if it may not name it."""
        return self._find(_key(ref.owner, ref.salt, ref.content or ""))

    def find_any(self, mm_hash: str) -> KnownFeature | None:
        """Return what is known of this feature, whoever may name it."""
        key = self._newest.get(mm_hash)
        return None if key is None else self._find(key)

    def _find(self, key: bytes) -> KnownFeature | None:
        return self._known.use(key, expires_at=self._clock() + self._ttl_s)


def _key(*owner_salt_name: str) -> bytes:
    """Return a fixed-size key: salts and names may have any length."""
    return blake3(msgspec.msgpack.encode(owner_salt_name)).digest()
