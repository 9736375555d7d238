"""The aiohttp session for fetching media, hardened against hostile origins.

Every address that a name resolves to is validated before connecting, and the number of connections is limited. Requests
share no state: no cookies. No proxies from the environment, no decompression.
"""

from __future__ import annotations

import asyncio
import socket
from functools import partial

import aiohttp
from aiohttp import StreamReader
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import RawResponseMessage

from medialane.media.config import MediaConfig
from medialane.media.url_guard import UrlGuard

#: Servers send one (100) or two (102, 103) before the final response.
_MAX_INTERIM = 16


def open_session(config: MediaConfig, guard: UrlGuard, resolver: AbstractResolver) -> aiohttp.ClientSession:
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
