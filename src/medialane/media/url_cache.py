"""What is known of URLs: which content they gave, how long that holds, and how to ask whether it still does.

Only hashes are kept; the content lives elsewhere, or nowhere. Pure: the clock is the caller's.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import msgspec
from blake3 import blake3

#: Longer validators are not kept: an origin must not choose how much memory an entry takes.
_MAX_VALIDATOR_CHARS = 512


@dataclass(frozen=True, slots=True)
class Validators:
    """What a conditional request sends. They mean something at the URL that gave them only, redirects followed."""

    url: str
    etag: str | None
    last_modified: str | None

    @property
    def usable(self) -> bool:
        found = [value for value in (self.etag, self.last_modified) if value is not None]
        return bool(found) and all(len(value) <= _MAX_VALIDATOR_CHARS for value in found)


@dataclass(frozen=True, slots=True)
class KnownUrl:
    """The content that a URL gave. `lifetime_s` is what its origin granted then, None if it said nothing."""

    content_hash: str
    fresh_until: float
    lifetime_s: float | None = None
    validators: Validators | None = None


class UrlCache:
    """The last `max_urls` URLs in use, by key."""

    def __init__(self, max_urls: int) -> None:
        self._max_urls = max_urls
        self._known: OrderedDict[bytes, KnownUrl] = OrderedDict()

    def get(self, key: bytes) -> KnownUrl | None:
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
        return known

    def fresh(self, key: bytes, now: float) -> KnownUrl | None:
        """What is known, if it still holds without asking."""
        known = self.get(key)
        return known if known is not None and now < known.fresh_until else None

    def put(self, key: bytes, known: KnownUrl, now: float) -> None:
        """Remember, unless it could be of no use."""
        if known.fresh_until <= now and known.validators is None:
            self.forget(key)
            return
        self._known[key] = known
        self._known.move_to_end(key)
        while len(self._known) > self._max_urls:
            self._known.popitem(last=False)

    def forget(self, key: bytes) -> None:
        self._known.pop(key, None)

    def __len__(self) -> int:
        return len(self._known)


def url_key(url: str, salt: str) -> bytes:
    """The key of a URL for one tenant: 32 bytes, however long the URL."""
    return blake3(msgspec.msgpack.encode((url, salt))).digest()
