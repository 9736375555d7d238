"""From a reference to encoded bytes: concurrent fetches are deduplicated, and fresh cached URLs are not fetched."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Self

from aiohttp.abc import AbstractResolver

from medialane.media.config import MediaConfig
from medialane.media.http_cache import NOT_KEPT, KnownUrl, NameRecords, UrlCache, boot_time, url_key
from medialane.media.http_source import Body, HttpSource, Received
from medialane.media.local_files import LocalFiles
from medialane.runtime.tasks import SingleFlight
from medialane.types.errors import MediaFetchTimeout
from medialane.types.media import MediaRef, MediaSource

OpenBody = Callable[[MediaSource, str, int], Body]


class Fetcher:
    """Fetches media. An async context manager that owns connections and threads."""

    def __init__(
        self,
        config: MediaConfig,
        *,
        open_body: OpenBody,
        resolver: AbstractResolver | None = None,
        clock: Callable[[], float] = boot_time,
        records: NameRecords = NOT_KEPT,
    ) -> None:
        """`open_body` determines where bodies are stored. It gets the modality or "document", the tenant's salt as in
        `MediaRef`, and the most bytes that will be written.

        `resolver` replaces the system's; its results are validated all the same. What is known of URLs is kept in
        `records`, with times of the `clock`: an earlier process that has written them must have had the same settings.
        """
        self._config = config
        self._open_body = open_body
        self._resolver = resolver
        self._clock = clock
        self._urls = UrlCache(config.max_cached_urls, records)
        self._flights: SingleFlight[tuple[bytes, MediaSource, bool], str] = SingleFlight()

    async def __aenter__(self) -> Self:
        self._http = HttpSource(self._config, resolver=self._resolver)
        self._files = LocalFiles(self._config.allowed_local_media_path)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._files.close()
        await self._http.close()

    async def fetch(self, ref: MediaRef, *, need_data: bool = False) -> str:
        """Return the hash of the content of a URL, which is stored. Without `need_data`, one with a fresh known hash is
        not fetched.

        Concurrent callers for the same content share one fetch, which is cancelled with the last of them; its timeout
        applies to the callers who began it, others fetch once more. Errors have no `param`. Raises InvalidMediaUrl,
        UnsupportedUrlScheme, MediaUrlForbidden, TooManyRedirects, MediaFetchFailed, MediaFetchTimeout, MediaOverloaded,
        MediaTooLarge, EmptyMedia, UnsupportedMediaType (unsupported modality), UpstreamFailed, and what the body
        raises.
        """
        url = ref.url or ""
        key = url_key(url, ref.salt)
        if url[:5].lower() == "file:":
            return await self._flights.do((key, ref.source, True), lambda: self._read(ref, url))
        if not need_data and (known := self._urls.fresh(key, self._clock())) is not None:
            return known.content_hash
        flight = (key, ref.source, need_data)
        fetch = partial(self._flights.do, flight, lambda: self._fetch(ref, url, key, need_data=need_data))
        if flight not in self._flights:
            return await fetch()
        try:
            return await fetch()
        except MediaFetchTimeout:
            return await fetch()

    async def _fetch(self, ref: MediaRef, url: str, key: bytes, *, need_data: bool) -> str:
        known = None if need_data else self._urls.get(key)
        requested_at = self._clock()
        received = await self._http.get(
            url,
            self._config.fetch_limits(ref.source),
            None if known is None else known.validators,
            open_body=lambda: self._body(ref),
        )
        hash_ = _hash(received, known)
        self._remember(key, received, content_hash=hash_, known=known, requested_at=requested_at)
        return hash_

    async def _read(self, ref: MediaRef, url: str) -> str:
        limits = self._config.fetch_limits(ref.source)
        return await self._files.read(url, limits, open_body=lambda: self._body(ref))

    def _body(self, ref: MediaRef) -> Body:
        return self._open_body(ref.source, ref.salt, self._config.fetch_limits(ref.source).max_bytes)

    def _remember(
        self, key: bytes, received: Received, *, content_hash: str, known: KnownUrl | None, requested_at: float
    ) -> None:
        if not received.freshness.storable:
            self._urls.forget(key)
            return
        lifetime_s = received.freshness.lifetime_s
        if lifetime_s is None and received.content_hash is None and known is not None:
            lifetime_s = known.lifetime_s  # a 304 without a lifetime keeps the previous one (RFC 9111, section 3.2)
        fresh_until = requested_at + min(lifetime_s or 0.0, self._config.max_fresh_s)
        self._urls.put(key, KnownUrl(content_hash, fresh_until, lifetime_s, received.validators), self._clock())


def _hash(received: Received, known: KnownUrl | None) -> str:
    if received.content_hash is not None:
        return received.content_hash
    if known is None:
        raise ValueError("not modified, but not cached")
    return known.content_hash
