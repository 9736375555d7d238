"""HTTP caching: how long responses are fresh (RFC 9111, as a shared cache), and what is known of URLs.

The cache stores only hashes; the content may be stored elsewhere. The caller supplies the current time. What a cache of
names knows outlives its process in `NameRecords`.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Protocol

import msgspec
from blake3 import blake3
from multidict import CIMultiDict, CIMultiDictProxy


class NameRecords(Protocol):
    """Payloads of a few bytes by key, kept on a best-effort basis: one that cannot be kept is missing at the next
    `read`, but never replaced by an earlier payload of its key. Methods take microseconds and raise nothing."""

    def read(self) -> Iterable[tuple[bytes, bytes]]:
        """Return keys and payloads as an earlier process has left them; called before the others."""
        ...

    def write(self, key: bytes, payload: bytes) -> None:
        """Keep `payload` in place of the earlier one of `key`, a hash of 32 bytes."""
        ...

    def erase(self, key: bytes) -> None: ...


class _NotKept:
    def read(self) -> Iterable[tuple[bytes, bytes]]:
        return ()

    def write(self, key: bytes, payload: bytes) -> None:
        pass

    def erase(self, key: bytes) -> None:
        pass


#: Records of names that are lost with their process.
NOT_KEPT: NameRecords = _NotKept()


def boot_time() -> float:
    """Return the seconds since the host has booted, which all of its processes agree on. Unlike time.monotonic it
    counts the time in which the host was suspended; unlike the date it is never set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


Headers = CIMultiDict[str] | CIMultiDictProxy[str]

#: Longer validators are not stored: an origin must not control how much memory an entry uses.
_MAX_VALIDATOR_CHARS = 512
#: Longer ones are not kept for the next process.
_MAX_KEPT_CHARS = 80


@dataclass(frozen=True, slots=True)
class Validators:
    """Validators for a conditional request. Valid only for the URL whose digest (`url_digest`) is `url`: the one
    after redirects that returned them. A URL may be long, and contain a client's secret."""

    url: bytes
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


#: A `KnownUrl`, with the fields of its `Validators`.
_Record = tuple[str, float, float | None, tuple[bytes, str | None, str | None] | None]


class UrlCache:
    """An LRU cache of `max_urls` URLs, by key. They are kept in `records` and taken from there: `now` must be the time
    of the clock of the process that has written them. Validators that are too long for a record are not kept."""

    def __init__(self, max_urls: int, records: NameRecords = NOT_KEPT) -> None:
        self._max_urls = max_urls
        self._records = records
        self._known: OrderedDict[bytes, KnownUrl] = OrderedDict()
        for key, payload in records.read():
            content, fresh_until, lifetime_s, validators = msgspec.msgpack.decode(payload, type=_Record)
            sent = None if validators is None else Validators(*validators)
            self._known[key] = KnownUrl(content, fresh_until, lifetime_s, sent)
        while len(self._known) > max_urls:
            self._forget_oldest()

    def get(self, key: bytes) -> KnownUrl | None:
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
        return known

    def fresh(self, key: bytes, now: float) -> KnownUrl | None:
        """Return the entry if it is fresh, i.e. needs no revalidation."""
        known = self.get(key)
        return known if known is not None and now < known.fresh_until else None

    def put(self, key: bytes, known: KnownUrl, now: float) -> None:
        """Store an entry, unless it is stale and cannot be revalidated."""
        if known.fresh_until <= now and known.validators is None:
            self.forget(key)
        elif self._max_urls:
            if key not in self._known and len(self._known) >= self._max_urls:
                self._forget_oldest()
            self._known[key] = known
            self._known.move_to_end(key)
            self._write(key, known)

    def forget(self, key: bytes) -> None:
        if self._known.pop(key, None) is not None:
            self._records.erase(key)

    def __len__(self) -> int:
        return len(self._known)

    def _write(self, key: bytes, known: KnownUrl) -> None:
        sent = known.validators
        text = "" if sent is None else (sent.etag or "") + (sent.last_modified or "")
        is_kept = sent is not None and len(text) <= _MAX_KEPT_CHARS and text.isascii()
        validators = (sent.url, sent.etag, sent.last_modified) if sent is not None and is_kept else None
        record: _Record = known.content_hash, known.fresh_until, known.lifetime_s, validators
        self._records.write(key, msgspec.msgpack.encode(record))

    def _forget_oldest(self) -> None:
        self.forget(next(iter(self._known)))


def url_digest(url: str) -> bytes:
    return blake3(url.encode()).digest(length=16)


def url_key(url: str, salt: str) -> bytes:
    """Return the key of a URL for one tenant: 32 bytes, regardless of the URL's length."""
    return blake3(msgspec.msgpack.encode((url, salt))).digest()


@dataclass(frozen=True, slots=True)
class Freshness:
    """Whether and for how long a response is fresh. `lifetime_s` is None if unspecified: then always revalidate."""

    storable: bool = True
    lifetime_s: float | None = None

    def through(self, redirect: Freshness) -> Freshness:
        """Return this response's freshness if reached through a redirect: at most the redirect's own."""
        lifetime_s = min(self.lifetime_s or 0.0, redirect.lifetime_s or 0.0)
        return Freshness(self.storable and redirect.storable, lifetime_s)


def freshness_of(headers: Headers) -> Freshness:
    """Return the freshness that a response's headers allow."""
    directives = _directives(headers)
    if "no-store" in directives or "private" in directives or headers.get("Vary", "").strip() == "*":
        return Freshness(storable=False)
    if "no-cache" in directives:
        return Freshness(lifetime_s=0.0)
    lifetime_s = _lifetime_s(directives, headers)
    if lifetime_s is None:
        return Freshness()
    return Freshness(lifetime_s=max(0.0, lifetime_s - (_seconds(headers.get("Age")) or 0.0)))


def _directives(headers: Headers) -> dict[str, str]:
    directives = {}
    for directive in ",".join(headers.getall("Cache-Control", [])).split(","):
        name, _, value = directive.partition("=")
        directives[name.strip().lower()] = value.strip().strip('"')
    return directives


def _lifetime_s(directives: dict[str, str], headers: Headers) -> float | None:
    for name in ("s-maxage", "max-age"):
        if name in directives:
            return _seconds(directives[name]) or 0.0
    if "Expires" not in headers:
        return None
    try:
        return (parsedate_to_datetime(headers["Expires"]) - parsedate_to_datetime(headers["Date"])).total_seconds()
    except (KeyError, ValueError, TypeError, OverflowError):  # no date, an invalid one, or only one with a time zone
        return 0.0


def _seconds(text: str | None) -> float | None:
    """Parse delta-seconds (RFC 9111, section 1.2.2); None if invalid. Ten digits are effectively forever."""
    return float(text[:10]) if text is not None and text.isascii() and text.isdigit() else None
