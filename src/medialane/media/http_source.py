"""One HTTP fetch: validated, limited in bytes and time, with redirects and one retry.

Theory of operation. A fetch makes at most two attempts, an attempt at most `max_redirects` + 1 requests, all under one
deadline: a host may be silent until then. Only transient failures are retried: connection errors, 408, 429, 5xx. Policy
refusals are final. Any 2xx is success: the bytes decide, unless they are said to be only a part. So is 304 for a
conditional request. Data is hashed and written to the body in chunks of at most 128 KiB (aiohttp's buffer, which limits
decompression as well), so memory use does not grow with its size.

Each request has a place of its host, which is the set of addresses that the URL's name stands for, and the port: names
cost nothing. A lookup has a place of the name's domain until its thread has returned, since it cannot be cancelled.

The session is hardened against hostile origins. Every address that a name resolves to is validated before connecting.
Requests share no state: no cookies. No proxies from the environment.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address, ip_interface
from typing import Protocol

import aiohttp
from aiohttp import StreamReader
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.client_proto import ResponseHandler
from aiohttp.helpers import is_ip_address
from aiohttp.http import RawResponseMessage
from blake3 import blake3
from yarl import URL

from medialane.media.config import FetchLimits, MediaConfig
from medialane.media.host_places import FetchTime, HostPlaces, Place
from medialane.media.http_cache import Freshness, Validators, freshness_of, url_digest
from medialane.media.url_guard import UrlGuard, unwrap
from medialane.types.errors import (
    EmptyMedia,
    MediaFetchFailed,
    MediaFetchTimeout,
    MedialaneError,
    MediaTooLarge,
    TooManyRedirects,
    UpstreamFailed,
    raise_exhausted,
)

_REDIRECTS = frozenset((301, 302, 303, 307, 308))

#: Refusals that say "not now".
_TRANSIENT = frozenset((408, 429))

#: Longest Retry-After that is honoured; for a longer one, there is no second attempt.
MAX_RETRY_AFTER_S = 2.0
_RETRY_DELAY_S = 0.2

#: Decoded by aiohttp in bounded chunks.
_CONTENT_CODINGS = frozenset(("", "identity", "gzip", "deflate"))

#: The range of a 206 (RFC 9110, section 14.4). We ask for none: some hosts send the whole as one.
_WHOLE_RANGE = re.compile(r"bytes 0-([0-9]{1,20})/(?:\*|([0-9]{1,20}))", re.IGNORECASE)

#: Longest wait for a thread to look a name up again for a new connection.
_MAX_LOOKUP_WAIT_S = 1.0
_MAX_LOOKUP_S = 600.0

#: Names whose addresses are remembered, to know their places without a lookup.
_MAX_NAMES = 4096

#: Servers send one (100) or two (102, 103) before the final response.
_MAX_INTERIM = 16


class Body(Protocol):
    """Where the body of a fetch is stored while it is read: it may be as large as a video, and arrives in chunks, which
    are written sequentially. Its owner ends it once, by `finish` or `abandon`."""

    def expect(self, num_bytes: int) -> None:
        """Announce the declared length, 0 if unknown, before the first chunk. Allocates no memory yet."""
        ...

    def write(self, piece: bytes) -> None:
        """Append a copy of a chunk. Raises ArenaFull."""
        ...

    def finish(self, content_hash: str) -> None:
        """Store the body under its hash. Raises what `sniff` raises: then it must still be abandoned."""
        ...

    def abandon(self) -> None:
        """Release the memory. Idempotent; no effect after `finish`."""
        ...


@dataclass(frozen=True, slots=True)
class Received:
    """An origin's response: no `content_hash` if not modified (304)."""

    content_hash: str | None
    freshness: Freshness
    validators: Validators | None


class HttpSource:
    """Fetches over HTTP. Created inside a running loop; the creator closes it."""

    def __init__(self, config: MediaConfig, *, resolver: AbstractResolver | None = None) -> None:
        self._config = config
        self._guard = UrlGuard(config)
        self._places = HostPlaces(
            config.max_fetches,
            config.max_fetches_per_host,
            min_rate_bytes_per_s=config.min_rate_bytes_per_s,
            grace_s=config.min_rate_grace_s,
        )
        self._names = _Names(config, self._guard, resolver)
        self._session = _open_session(self._guard, self._names)

    async def close(self) -> None:
        await self._session.close()
        await self._names.close()

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
        MediaFetchTimeout, MediaOverloaded (no place), MediaTooLarge, EmptyMedia, UpstreamFailed, and what the body
        raises.
        """
        time = FetchTime(asyncio.get_running_loop().time() + limits.timeout_s, limits.timeout_s)
        request = _FetchRequest(url, limits, validators, open_body, time)
        try:
            try:
                return await self._attempt(request)
            except _RetryableFailure as failure:
                if failure.delay_s > MAX_RETRY_AFTER_S:
                    raise
                async with asyncio.timeout_at(time.deadline):
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
                host = await self._names.host(target, request.time)
                async with (
                    self._places.hold(host, request.time) as place,
                    self._session.get(target, allow_redirects=False, headers=_conditions(sent)) as response,
                ):
                    if response.status not in _REDIRECTS:
                        return await self._receive(
                            response, request, place, sent=sent, target=target, redirected=redirected
                        )
            redirected.append(freshness_of(response.headers))
            target = self._guard.follow(target, response.headers.get("Location"))
        raise TooManyRedirects(f"the media URL redirects more than {self._config.max_redirects} times")

    async def _receive(
        self,
        response: aiohttp.ClientResponse,
        request: _FetchRequest,
        place: Place,
        *,
        sent: Validators | None,
        target: URL,
        redirected: list[Freshness],
    ) -> Received:
        headers = response.headers
        freshness = freshness_of(headers) if response.status in (200, 304) else Freshness(storable=False)
        for hop in redirected:
            freshness = freshness.through(hop)
        if response.status == 304 and sent is not None:
            return Received(None, freshness, sent)
        _check(response)
        content = await self._read(response, request, place)
        validators = Validators(url_digest(str(target)), headers.get("ETag"), headers.get("Last-Modified"))
        return Received(content, freshness, validators if validators.usable else None)

    async def _read(self, response: aiohttp.ClientResponse, request: _FetchRequest, place: Place) -> str:
        """Read the response into a body. Returns its hash."""
        declared = 0 if _coding(response) else response.content_length or 0
        if declared > request.limits.max_bytes:
            raise MediaTooLarge(f"the media has {declared} bytes, more than {request.limits.max_bytes}")
        body = request.open_body()
        try:
            body.expect(declared)
            content = await self._fill(body, response, request.limits.max_bytes, place)
            body.finish(content)
        except BaseException:  # cancelled or failed: release the body's memory
            body.abandon()
            raise
        return content

    async def _fill(self, body: Body, response: aiohttp.ClientResponse, max_bytes: int, place: Place) -> str:
        """Write the response to `body`, up to the limit, and return its hash.

        aiohttp checks that it has the declared length.
        """
        hasher = blake3()
        num_bytes = 0
        async for chunk in response.content.iter_any():
            num_bytes += len(chunk)
            place.num_bytes = num_bytes
            if num_bytes > max_bytes:
                raise MediaTooLarge(f"the media has more than {max_bytes} bytes")
            body.write(chunk)
            hasher.update(chunk)
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
    time: FetchTime


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


def _coding(response: aiohttp.ClientResponse) -> str:
    coding = response.headers.get("Content-Encoding", "").strip().lower()
    return "" if coding == "identity" else coding


def _check(response: aiohttp.ClientResponse) -> None:
    """Raise unless the response is 2xx with a whole body that aiohttp decodes."""
    answered = f"the media host answered with status {response.status}"
    if response.status in _TRANSIENT or response.status >= 500:
        raise _RetryableFailure(UpstreamFailed(answered), _delay_s(response))
    if response.status >= 400:
        raise MediaFetchFailed(answered)
    if not 200 <= response.status < 300:
        raise UpstreamFailed(answered)
    if response.status == 206 and not _is_whole(response.headers.get("Content-Range", "bytes 0-0/*")):
        raise UpstreamFailed("the media host sent only a part of the media")
    if _coding(response) not in _CONTENT_CODINGS:
        raise UpstreamFailed("the media host used an unsupported content encoding")
    # aiohttp passes on other transfer codings undecoded.
    if response.headers.get("Transfer-Encoding", "chunked").strip().lower() != "chunked":
        raise UpstreamFailed("the media host used an unsupported transfer encoding")


def _is_whole(content_range: str) -> bool:
    match = _WHOLE_RANGE.fullmatch(content_range.strip())
    return match is not None and (match[2] is None or int(match[1]) + 1 == int(match[2]))


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


def _open_session(guard: UrlGuard, resolver: AbstractResolver) -> aiohttp.ClientSession:
    """Create the session, inside a running loop. The caller closes it. It has no limits of time and connections: places
    have."""
    connector = aiohttp.TCPConnector(
        resolver=resolver, socket_factory=guard.open_socket, use_dns_cache=False, limit=0, limit_per_host=0
    )
    made: type[ResponseHandler] = _InterimResponseLimit
    connector._factory = partial(made, loop=asyncio.get_running_loop())  # noqa: SLF001 - the only hook
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None),
        headers={"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "medialane"},
        cookie_jar=aiohttp.DummyCookieJar(),
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


#: What a fetch has just looked up itself, for the connection that it opens.
_looked_up: ContextVar[list[ResolveResult] | None] = ContextVar("_looked_up", default=None)


class _Names(AbstractResolver):
    """Looks up names, and requires every address of a name to be an allowed one."""

    def __init__(self, config: MediaConfig, guard: UrlGuard, resolver: AbstractResolver | None) -> None:
        self._guard = guard
        self._threads = ThreadPoolExecutor(config.max_fetches, "media-lookup")
        self._places = HostPlaces(config.max_fetches, config.max_fetches_per_host)
        self._inner = resolver or _ThreadedResolver(self._threads)
        self._running: dict[tuple[str, int], asyncio.Task[list[ResolveResult]]] = {}
        self._known: OrderedDict[tuple[str, int], str] = OrderedDict()

    async def host(self, target: URL, time: FetchTime) -> str:
        """Return the host that a request to `target` needs a place of. Raises MediaOverloaded, MediaUrlForbidden,
        TimeoutError, ClientOSError."""
        name, port = target.raw_host or "", target.port or 0
        _looked_up.set(None)
        if is_ip_address(name):
            return _host([name], port)
        if (name, port) not in self._known:
            try:
                _looked_up.set(await self._look_up(name, port, time))
            except TimeoutError:
                raise
            except OSError as error:
                raise aiohttp.ClientOSError(*error.args) from error  # like aiohttp's connector
        return self._known[name, port]

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Called by aiohttp for a new connection, while the fetch has a place and its time runs."""
        later = asyncio.get_running_loop().time() + _MAX_LOOKUP_S  # the fetch's own time ends earlier
        return _looked_up.get() or await self._look_up(host, port, FetchTime(later, _MAX_LOOKUP_WAIT_S))

    async def close(self) -> None:
        tasks = [task for task in self._running.values() if task.cancel()]
        await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._inner.close()

    async def _look_up(self, name: str, port: int, time: FetchTime) -> list[ResolveResult]:
        """Look a name up once for all who ask meanwhile: one that hangs keeps a single thread."""
        key = name, port
        while (task := self._running.get(key)) is None:
            place = await self._places.take(".".join(name.rstrip(".").rsplit(".", 2)[-2:]), time)
            if key in self._running:  # since we waited
                self._places.give_back(place)
            else:
                task = asyncio.create_task(self._inner.resolve(name, port, socket.AF_UNSPEC))
                self._running[key] = task
                task.add_done_callback(partial(self._end, key, place))
        async with asyncio.timeout_at(time.deadline):
            results = await asyncio.shield(task)
        for result in results:
            self._guard.check_address(result["host"], result["port"])
        self._known[key] = _host([result["host"] for result in results], port)
        if len(self._known) > _MAX_NAMES:
            self._known.popitem(last=False)
        return results

    def _end(self, key: tuple[str, int], place: Place, task: asyncio.Task[list[ResolveResult]]) -> None:
        del self._running[key]
        self._places.give_back(place)
        if not task.cancelled():
            task.exception()  # retrieved, if nobody waits any more


class _ThreadedResolver(AbstractResolver):
    """The system's resolver, in threads that nothing else needs: one that hangs cannot be ended."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        look_up = partial(socket.getaddrinfo, host, port, family, socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
        numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return [
            ResolveResult(hostname=host, host=str(found[0]), port=port, family=family_, proto=proto, flags=numeric)
            for family_, _, proto, _, found in await asyncio.get_running_loop().run_in_executor(self._threads, look_up)
        ]

    async def close(self) -> None:
        """The creator closes the threads."""


def _host(addresses: list[str], port: int) -> str:
    """Return what has a share of the places: addresses and port. Who has an IPv6 address has its network (/64)."""
    reached = {each for address in addresses for each in unwrap(ip_address(address))}
    keys = {str(ip_interface((each, 64)).network if each.version == 6 else each) for each in reached}
    return f"{sorted(keys)}:{port}"
