"""The features that clients may name by their hash, and what each was made of, so that it can be made again.

A hash is in reports and spans, so knowing it is no right to the feature: a client may name those of its own requests,
by the reference's owner and the request's `cache_salt`; the operator, on this host, may name all. Nothing here
keeps media or tensors in the arena. Pure: the clock is injected.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
from blake3 import blake3
from cachetools import LRUCache

from medialane.types.media import MediaRef
from medialane.types.media_lease import TenantLru, tenant_of

#: Of all records; one has about 600 bytes.
MAX_BYTES = 32 << 20
_RECORD_BYTES = 600
#: A feature of a longer URL is made again only as long as its encoded bytes are cached.
MAX_URL_CHARS = 4096


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
    """An LRU cache of at most `max_bytes`, of which a tenant has a share; records expire `ttl_s` seconds after their
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
        key = _key(mm_hash, of)
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
        return self._find(_key(ref.content or "", ref))

    def find_any(self, mm_hash: str) -> KnownFeature | None:
        """Return what is known of this feature, whoever may name it."""
        key = self._newest.get(mm_hash)
        return None if key is None else self._find(key)

    def _find(self, key: bytes) -> KnownFeature | None:
        return self._known.use(key, expires_at=self._clock() + self._ttl_s)


def _key(mm_hash: str, ref: MediaRef) -> bytes:
    """Return a fixed-size key: salts may have any length."""
    return blake3(msgspec.msgpack.encode((ref.owner, ref.salt, mm_hash))).digest()
