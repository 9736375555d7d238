"""Cache of URL metadata: content hash, freshness lifetime, and validators for revalidation.

Stores only hashes; the content may be stored elsewhere. The caller supplies the current time.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from blake3 import blake3
from cachetools import LRUCache

#: Longer validators are not stored: an origin must not control how much memory an entry uses.
_MAX_VALIDATOR_CHARS = 512


@dataclass(frozen=True, slots=True)
class Validators:
    """Validators for a conditional request. Valid only for `url`, the one after redirects that returned them."""

    url: str
    etag: str | None
    last_modified: str | None

    @property
    def usable(self) -> bool:
        given = [value for value in (self.etag, self.last_modified) if value is not None]
        return bool(given) and all(len(value) <= _MAX_VALIDATOR_CHARS for value in given)


@dataclass(frozen=True, slots=True)
class KnownUrl:
    """A URL's content. `lifetime_s` is the freshness lifetime that its origin granted, None if unspecified."""

    content_hash: str
    fresh_until: float
    lifetime_s: float | None = None
    validators: Validators | None = None


class UrlCache:
    """An LRU cache of `max_urls` URLs, by key."""

    def __init__(self, max_urls: int) -> None:
        self._known: LRUCache[bytes, KnownUrl] = LRUCache(max_urls)

    def get(self, key: bytes) -> KnownUrl | None:
        return self._known.get(key)

    def fresh(self, key: bytes, now: float) -> KnownUrl | None:
        """Return the entry if it is fresh, i.e. needs no revalidation."""
        known = self.get(key)
        return known if known is not None and now < known.fresh_until else None

    def put(self, key: bytes, known: KnownUrl, now: float) -> None:
        """Store an entry, unless it is stale and cannot be revalidated."""
        if known.fresh_until <= now and known.validators is None:
            self.forget(key)
        elif self._known.maxsize:
            self._known[key] = known

    def forget(self, key: bytes) -> None:
        self._known.pop(key, None)

    def __len__(self) -> int:
        return len(self._known)


def url_key(url: str, salt: str) -> bytes:
    """Return the key of a URL for one tenant: 32 bytes, regardless of the URL's length."""
    return blake3(msgspec.msgpack.encode((url, salt))).digest()
