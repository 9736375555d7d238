"""One HTTP fetch: vetted, bounded in bytes and time, redirects and one retry included.

Theory of operation. A fetch is at most two attempts, an attempt at most `max_redirects` + 1 requests, all under one
deadline. The second attempt is for what may pass by itself: no connection, 429, 5xx. What policy refuses is final. Only
200 is success, and 304 if we asked conditionally. Content codings are refused, since a coding hides the size. What
arrives is hashed and handed to the body piece by piece (128 KiB at most, aiohttp's buffer): nothing here grows with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import aiohttp
from aiohttp.abc import AbstractResolver
from blake3 import blake3
from yarl import URL

from medialane.core.errors import (
    EmptyMedia,
    MediaFetchFailed,
    MediaFetchTimeout,
    MedialaneError,
    MediaTooLarge,
    TooManyRedirects,
    UpstreamFailed,
)
from medialane.media.body import Body, HeapBody
from medialane.media.config import FetchLimits, MediaConfig
from medialane.media.freshness import Freshness, freshness_of
from medialane.media.http_session import open_session
from medialane.media.url_cache import Validators
from medialane.media.url_guard import UrlGuard

_REDIRECTS = frozenset((301, 302, 303, 307, 308))

#: An origin may ask for a pause of this length before the second attempt, not for more.
MAX_RETRY_AFTER_S = 2.0
_RETRY_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class Received:
    """What an origin answered: no `content_hash` if it is what it was (304), no `data` if the body keeps its bytes."""

    content_hash: str | None
    data: bytearray | None
    freshness: Freshness
    validators: Validators | None

    def __repr__(self) -> str:
        content = "not modified" if self.content_hash is None else self.content_hash[:12]
        return f"Received({content}, {self.freshness})"


class HttpSource:
    """Fetches over HTTP. Made inside a running loop; whoever makes it closes it."""

    def __init__(self, config: MediaConfig, *, resolver: AbstractResolver | None = None) -> None:
        self._config = config
        self._guard = UrlGuard(config)
        self._session = open_session(config, self._guard, resolver or aiohttp.ThreadedResolver())

    async def close(self) -> None:
        await self._session.close()

    async def get(
        self,
        url: str,
        limits: FetchLimits,
        validators: Validators | None = None,
        *,
        open_body: Callable[[], Body] = HeapBody,
    ) -> Received:
        """Fetch `url` into a body, conditionally if there are `validators`. Cancellation leaves nothing behind.

        Raises InvalidMediaUrl, UnsupportedUrlScheme, MediaUrlForbidden, TooManyRedirects, MediaFetchFailed,
        MediaFetchTimeout, MediaTooLarge, EmptyMedia, UpstreamFailed, and what the body raises.
        """
        wanted = _FetchRequest(url, limits, validators, open_body)
        try:
            async with asyncio.timeout(limits.timeout_s):
                try:
                    return await self._attempt(wanted)
                except _RetryableFailure as failure:
                    if failure.pause_s > MAX_RETRY_AFTER_S:
                        raise failure.error from failure
                    await asyncio.sleep(failure.pause_s)
                try:
                    return await self._attempt(wanted)
                except _RetryableFailure as failure:
                    raise failure.error from failure
        except TimeoutError as error:
            raise MediaFetchTimeout("timeout while fetching the media") from error

    async def _attempt(self, wanted: _FetchRequest) -> Received:
        target = self._guard.parse(wanted.url)
        redirected: list[Freshness] = []
        for _ in range(self._config.max_redirects + 1):
            asked = wanted.validators
            if asked is not None and asked.url != str(target):
                asked = None
            with _mapped_errors():
                async with self._session.get(target, allow_redirects=False, headers=_conditions(asked)) as response:
                    if response.status not in _REDIRECTS:
                        return await self._receive(response, wanted, asked=asked, target=target, redirected=redirected)
            redirected.append(freshness_of(response.headers))
            target = self._guard.follow(target, response.headers.get("Location"))
        raise TooManyRedirects(f"the media URL redirects more than {self._config.max_redirects} times")

    async def _receive(
        self,
        response: aiohttp.ClientResponse,
        wanted: _FetchRequest,
        *,
        asked: Validators | None,
        target: URL,
        redirected: list[Freshness],
    ) -> Received:
        headers = response.headers
        freshness = freshness_of(headers)
        for hop in redirected:
            freshness = freshness.through(hop)
        if response.status == 304 and asked is not None:
            return Received(None, None, freshness, asked)
        _check(response)
        content, data = await self._read(response, wanted)
        validators = Validators(str(target), headers.get("ETag"), headers.get("Last-Modified"))
        return Received(content, data, freshness, validators if validators.usable else None)

    async def _read(self, response: aiohttp.ClientResponse, wanted: _FetchRequest) -> tuple[str, bytearray | None]:
        """The body's hash, and its bytes if it does not keep them."""
        declared = response.content_length or 0
        if declared > wanted.limits.max_bytes:
            raise MediaTooLarge(f"the media has {declared} bytes, more than {wanted.limits.max_bytes}")
        body = wanted.open_body()
        try:
            body.expect(declared)
            content = await self._fill(body, response, wanted.limits)
            return content, body.finish(content)
        except BaseException:  # cancelled or failed, the body's memory goes back
            body.abandon()
            raise

    async def _fill(self, body: Body, response: aiohttp.ClientResponse, limits: FetchLimits) -> str:
        """Write what arrives to `body`, no more than the limit of it, and return its hash.

        That it is as long as declared, aiohttp checks.
        """
        hasher = blake3()
        num_bytes = 0
        clock = asyncio.get_running_loop().time
        started = clock()
        async for piece in response.content.iter_any():
            num_bytes += len(piece)
            if num_bytes > limits.max_bytes:
                raise MediaTooLarge(f"the media has more than {limits.max_bytes} bytes")
            body.write(piece)
            hasher.update(piece)
            elapsed_s = clock() - started
            if elapsed_s > self._config.min_rate_grace_s and num_bytes < elapsed_s * self._config.min_rate_bytes_per_s:
                raise MediaFetchTimeout("the media host sends too slowly")
        if not num_bytes:
            raise EmptyMedia("the media is empty")
        return hasher.hexdigest()


@dataclass(frozen=True, slots=True)
class _FetchRequest:
    """What one fetch is for: the same in each of its attempts."""

    url: str
    limits: FetchLimits
    validators: Validators | None
    open_body: Callable[[], Body]


class _RetryableFailure(Exception):
    """An attempt failed in a way that another may not; `error` is what to say if there is no other."""

    def __init__(self, error: MedialaneError, pause_s: float = _RETRY_PAUSE_S) -> None:
        super().__init__(error.message)
        self.error = error
        self.pause_s = pause_s


def _conditions(validators: Validators | None) -> dict[str, str]:
    if validators is None:
        return {}
    conditions = {"If-None-Match": validators.etag, "If-Modified-Since": validators.last_modified}
    return {name: value for name, value in conditions.items() if value is not None}


def _check(response: aiohttp.ClientResponse) -> None:
    """Raise unless the answer is the media, as it is."""
    if response.status == 429 or response.status >= 500:
        raise _RetryableFailure(
            UpstreamFailed(f"the media host answered with status {response.status}"), _pause_s(response)
        )
    if response.status != 200:
        raise MediaFetchFailed(f"the media host answered with status {response.status}")
    if response.headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
        raise MediaFetchFailed("the media host used an unsupported content encoding")
    # aiohttp hands on what other transfer codings leave, coded as it is.
    if response.headers.get("Transfer-Encoding", "chunked").strip().lower() != "chunked":
        raise MediaFetchFailed("the media host used an unsupported transfer encoding")


def _pause_s(response: aiohttp.ClientResponse) -> float:
    """Retry-After in its form of seconds; a date is not worth a clock comparison for a pause of two seconds."""
    asked = response.headers.get("Retry-After", "")
    return float(asked[:10]) if asked.isascii() and asked.isdigit() else _RETRY_PAUSE_S


@contextmanager
def _mapped_errors() -> Iterator[None]:
    """aiohttp's errors as ours. Timeouts are left to the fetch's own handler."""
    try:
        yield
    except TimeoutError:
        raise
    except aiohttp.ClientSSLError as error:
        raise MediaFetchFailed("TLS connection to the media host failed") from error
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise _RetryableFailure(MediaFetchFailed("cannot connect to the media host")) from error
    except (aiohttp.ClientError, ValueError) as error:
        raise MediaFetchFailed("the media host sent an invalid HTTP response") from error
