"""One HTTP fetch: validated, limited in bytes and time, with redirects and one retry.

Theory of operation. A fetch makes at most two attempts, an attempt at most `max_redirects` + 1 requests, all under one
deadline. Only transient failures are retried: connection errors, 408, 429, 5xx. Policy refusals are final. Only 200 is
success, and 304 for a conditional request. Content codings are rejected, because they hide the size. Data is hashed and
written to the body in chunks of at most 128 KiB (aiohttp's buffer), so memory use does not grow with its size.

The session is hardened against hostile origins. Every address that a name resolves to is validated before connecting,
and the number of connections is limited. Requests share no state: no cookies. No proxies from the environment, no
decompression.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import aiohttp
from aiohttp import StreamReader
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import RawResponseMessage
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
from medialane.core.own_fault import raise_exhausted
from medialane.media.body import Body
from medialane.media.config import FetchLimits, MediaConfig
from medialane.media.http_cache import Freshness, Validators, freshness_of, url_digest
from medialane.media.url_guard import UrlGuard

_REDIRECTS = frozenset((301, 302, 303, 307, 308))

#: Refusals that say "not now".
_TRANSIENT = frozenset((408, 429))

#: Longest Retry-After that is honoured; for a longer one, there is no second attempt.
MAX_RETRY_AFTER_S = 2.0
_RETRY_DELAY_S = 0.2

#: Servers send one (100) or two (102, 103) before the final response.
_MAX_INTERIM = 16


@dataclass(frozen=True, slots=True)
class Received:
    """An origin's response: no `content_hash` if not modified (304)."""

    content_hash: str | None
    freshness: Freshness
    validators: Validators | None

    def __repr__(self) -> str:
        content = "not modified" if self.content_hash is None else self.content_hash[:12]
        return f"Received({content}, {self.freshness})"


class HttpSource:
    """Fetches over HTTP. Created inside a running loop; the creator closes it."""

    def __init__(self, config: MediaConfig, *, resolver: AbstractResolver | None = None) -> None:
        self._config = config
        self._guard = UrlGuard(config)
        self._session = _open_session(config, self._guard, resolver or aiohttp.ThreadedResolver())

    async def close(self) -> None:
        await self._session.close()

    async def get(
        self,
        url: str,
        limits: FetchLimits,
        validators: Validators | None = None,
        *,
        open_body: Callable[[], Body],
    ) -> Received:
        """Fetch `url` into a body, conditionally if `validators` are given. Cancellation releases everything.

        Raises InvalidMediaUrl, UnsupportedUrlScheme, MediaUrlForbidden, TooManyRedirects, MediaFetchFailed,
        MediaFetchTimeout, MediaTooLarge, EmptyMedia, UpstreamFailed, and what the body raises.
        """
        request = _FetchRequest(url, limits, validators, open_body)
        try:
            async with asyncio.timeout(limits.timeout_s):
                try:
                    return await self._attempt(request)
                except _RetryableFailure as failure:
                    if failure.delay_s > MAX_RETRY_AFTER_S:
                        raise
                    await asyncio.sleep(failure.delay_s)
                return await self._attempt(request)
        except _RetryableFailure as failure:
            raise failure.error from failure
        except TimeoutError as error:
            raise MediaFetchTimeout("timeout while fetching the media") from error

    async def _attempt(self, request: _FetchRequest) -> Received:
        target = self._guard.parse(request.url)
        redirected: list[Freshness] = []
        for _ in range(self._config.max_redirects + 1):
            sent = request.validators
            if sent is not None and sent.url != url_digest(str(target)):
                sent = None
            with _mapped_errors():
                async with self._session.get(target, allow_redirects=False, headers=_conditions(sent)) as response:
                    if response.status not in _REDIRECTS:
                        return await self._receive(response, request, sent=sent, target=target, redirected=redirected)
            redirected.append(freshness_of(response.headers))
            target = self._guard.follow(target, response.headers.get("Location"))
        raise TooManyRedirects(f"the media URL redirects more than {self._config.max_redirects} times")

    async def _receive(
        self,
        response: aiohttp.ClientResponse,
        request: _FetchRequest,
        *,
        sent: Validators | None,
        target: URL,
        redirected: list[Freshness],
    ) -> Received:
        headers = response.headers
        freshness = freshness_of(headers)
        for hop in redirected:
            freshness = freshness.through(hop)
        if response.status == 304 and sent is not None:
            return Received(None, freshness, sent)
        _check(response)
        content = await self._read(response, request)
        validators = Validators(url_digest(str(target)), headers.get("ETag"), headers.get("Last-Modified"))
        return Received(content, freshness, validators if validators.usable else None)

    async def _read(self, response: aiohttp.ClientResponse, request: _FetchRequest) -> str:
        """Read the response into a body. Returns its hash."""
        declared = response.content_length or 0
        if declared > request.limits.max_bytes:
            raise MediaTooLarge(f"the media has {declared} bytes, more than {request.limits.max_bytes}")
        body = request.open_body()
        try:
            body.expect(declared)
            content = await self._fill(body, response, request.limits)
            body.finish(content)
        except BaseException:  # cancelled or failed: release the body's memory
            body.abandon()
            raise
        return content

    async def _fill(self, body: Body, response: aiohttp.ClientResponse, limits: FetchLimits) -> str:
        """Write the response to `body`, up to the limit, and return its hash.

        aiohttp checks that it has the declared length.
        """
        hasher = blake3()
        num_bytes = 0
        clock = asyncio.get_running_loop().time
        started = clock()
        async for chunk in response.content.iter_any():
            num_bytes += len(chunk)
            if num_bytes > limits.max_bytes:
                raise MediaTooLarge(f"the media has more than {limits.max_bytes} bytes")
            body.write(chunk)
            hasher.update(chunk)
            elapsed_s = clock() - started
            if elapsed_s > self._config.min_rate_grace_s and num_bytes < elapsed_s * self._config.min_rate_bytes_per_s:
                raise MediaFetchTimeout("the media host sends too slowly")
        if not num_bytes:
            raise EmptyMedia("the media is empty")
        return hasher.hexdigest()


@dataclass(frozen=True, slots=True)
class _FetchRequest:
    """The arguments of one fetch, shared by its attempts."""

    url: str
    limits: FetchLimits
    validators: Validators | None
    open_body: Callable[[], Body]


class _RetryableFailure(Exception):
    """A transient failure of an attempt; `error` is raised if there is no further attempt."""

    def __init__(self, error: MedialaneError, delay_s: float = _RETRY_DELAY_S) -> None:
        super().__init__(error.message)
        self.error = error
        self.delay_s = delay_s


def _conditions(validators: Validators | None) -> dict[str, str]:
    if validators is None:
        return {}
    conditions = {"If-None-Match": validators.etag, "If-Modified-Since": validators.last_modified}
    return {name: value for name, value in conditions.items() if value is not None}


def _check(response: aiohttp.ClientResponse) -> None:
    """Raise unless the response is 200 with an unencoded body."""
    answered = f"the media host answered with status {response.status}"
    if response.status in _TRANSIENT or response.status >= 500:
        raise _RetryableFailure(UpstreamFailed(answered), _delay_s(response))
    if response.status >= 400:
        raise MediaFetchFailed(answered)
    if response.status != 200:
        raise UpstreamFailed(answered)
    if response.headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
        raise UpstreamFailed("the media host used an unsupported content encoding")
    # aiohttp passes on other transfer codings undecoded.
    if response.headers.get("Transfer-Encoding", "chunked").strip().lower() != "chunked":
        raise UpstreamFailed("the media host used an unsupported transfer encoding")


def _delay_s(response: aiohttp.ClientResponse) -> float:
    """Return Retry-After in seconds; its date form is ignored, given that the maximum is two seconds."""
    delay = response.headers.get("Retry-After", "")
    return float(delay[:10]) if delay.isascii() and delay.isdigit() else _RETRY_DELAY_S


@contextmanager
def _mapped_errors() -> Iterator[None]:
    """Convert aiohttp's errors to ours, except timeouts, which `get` handles."""
    try:
        yield
    except TimeoutError:
        raise
    except aiohttp.ClientSSLError as error:
        raise UpstreamFailed("TLS connection to the media host failed") from error
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise_exhausted(error)
        raise _RetryableFailure(UpstreamFailed("cannot connect to the media host")) from error
    except (aiohttp.ClientError, ValueError) as error:
        raise UpstreamFailed("the media host sent an invalid HTTP response") from error


def _open_session(config: MediaConfig, guard: UrlGuard, resolver: AbstractResolver) -> aiohttp.ClientSession:
    """Create the session, inside a running loop. The caller closes it."""
    connector = aiohttp.TCPConnector(
        resolver=_ValidatingResolver(guard, resolver),
        socket_factory=guard.open_socket,
        use_dns_cache=False,
        limit=config.max_fetches,
        limit_per_host=config.max_fetches_per_host,
    )
    made: type[ResponseHandler] = _InterimResponseLimit
    connector._factory = partial(made, loop=asyncio.get_running_loop())  # noqa: SLF001 - the only hook
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=config.connect_timeout_s, sock_read=config.first_byte_timeout_s
        ),
        headers={"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "medialane"},
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
    )


class _InterimResponseLimit(ResponseHandler):
    """Limits interim responses (1xx). aiohttp has no limit: a flood of them grew memory by 60 MB/s."""

    _num_interim = 0

    def feed_data(self, data: tuple[RawResponseMessage, StreamReader], size: int = 0) -> None:
        self._num_interim = self._num_interim + 1 if 100 <= data[0].code < 200 else 0
        if self._num_interim <= _MAX_INTERIM:
            super().feed_data(data, size)
        elif self.transport is not None:
            self.set_exception(aiohttp.ClientConnectionError("too many interim responses"))
            self.transport.abort()


class _ValidatingResolver(AbstractResolver):
    """Requires every address of a name to be an allowed one."""

    def __init__(self, guard: UrlGuard, inner: AbstractResolver) -> None:
        self._guard = guard
        self._inner = inner

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        addresses = await self._inner.resolve(host, port, family)
        for result in addresses:
            self._guard.check_address(result["host"], result["port"])
        return addresses

    async def close(self) -> None:
        await self._inner.close()
