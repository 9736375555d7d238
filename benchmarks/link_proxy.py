"""A connection between gateways and a worker that can be cut, or drop everything, and where a request goes is seen."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from medialane.wire import UnixAddress, parse_address

#: The number in a request's id (`request_id`), which the gateway makes anew for each attempt.
_ATTEMPT = re.compile(rb"lane-(\d{8})[^#]{0,40}#[^-]{1,60}-\d+")
_MAX_ID_BYTES = 128


def request_id(number: int) -> str:
    return f"lane-{number:08}"


class LinkProxy:
    """Listens at `address` for gateways, and connects them to the worker at `target`. `sent` is called with a request's
    number when an attempt of it goes to the worker."""

    def __init__(self, address: str, target: str, sent: Callable[[int], None]) -> None:
        self.address = address
        self.drops = False
        self._target = target
        self._sent = sent
        self._attempts: set[bytes] = set()
        self._transports: set[asyncio.Transport] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        loop, target = asyncio.get_running_loop(), parse_address(self.address)
        if isinstance(target, UnixAddress):
            self._server = await loop.create_unix_server(self._accepted, target.path)
        else:
            self._server = await loop.create_server(self._accepted, target.host, target.port)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()

    def cut(self) -> None:
        """Close all connections at both ends."""
        for transport in list(self._transports):
            transport.abort()

    def restore(self) -> None:
        """End `drops`. What was connected meanwhile is cut: bytes are missing."""
        self.drops = False
        self.cut()

    def passed_up(self, data: bytes) -> None:
        for attempt in _ATTEMPT.finditer(data):
            if attempt[0] not in self._attempts:
                self._attempts.add(attempt[0])
                self._sent(int(attempt[1]))

    def opened(self, transport: asyncio.Transport) -> None:
        self._transports.add(transport)

    def closed(self, transport: asyncio.Transport) -> None:
        self._transports.discard(transport)

    def connect(self, end: _End) -> None:
        """Connect a gateway's end to the worker."""
        task = asyncio.create_task(self._connect(end))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, end: _End) -> None:
        loop, target = asyncio.get_running_loop(), parse_address(self._target)
        try:
            if isinstance(target, UnixAddress):
                _, other = await loop.create_unix_connection(lambda: _End(self), target.path)
            else:
                _, other = await loop.create_connection(lambda: _End(self), target.host, target.port)
        except OSError:
            end.abort()
        else:
            end.join(other)

    def _accepted(self) -> _End:
        return _End(self, is_gateways=True)


class _End(asyncio.Protocol):
    """One end of a connection; what arrives before the other end is connected waits."""

    def __init__(self, link: LinkProxy, *, is_gateways: bool = False) -> None:
        self._link = link
        self._is_gateways = is_gateways
        self._transport: asyncio.Transport | None = None
        self._other: _End | None = None
        self._early: list[bytes] = []
        self._tail = b""

    def join(self, other: _End) -> None:
        self._other, other._other = other, self
        if self._transport is None or self._transport.is_closing():
            other.abort()
        for data in self._early:
            other.write(data)

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._link.opened(self._transport)
        if self._is_gateways and not self._link.drops:
            self._link.connect(self)

    def data_received(self, data: bytes) -> None:
        if self._link.drops:
            return
        if self._is_gateways:
            self._link.passed_up(self._tail + data)
            self._tail = data[-_MAX_ID_BYTES:]
        if self._other is None:
            self._early.append(data)
        else:
            self._other.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is not None:
            self._link.closed(self._transport)
        if self._other is not None:
            with suppress(RuntimeError):  # the loop closes
                self._other.abort()
