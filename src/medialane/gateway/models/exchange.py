"""One request of a client, its way to a gateway and the answer's way back.

Its body is read until it has named its model, and passed on from there.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from urllib.parse import unquote_plus

import aiohttp

from medialane.gateway.config import GatewayConfig
from medialane.gateway.http.asgi import WITHOUT_LENGTH, header, until_gone
from medialane.gateway.http.server import CLIENT_HEADER, address_header
from medialane.gateway.intake import WITHOUT_BODY, BodyMemory, BoundedReceive, BudgetCharge, Receive
from medialane.gateway.middleware import Scope, Send
from medialane.gateway.models.model_name import ModelSearch, search_of
from medialane.gateway.models.served_models import GatewayRequest, Headers, Model, end_to_end
from medialane.runtime.tasks import first_of
from medialane.types.errors import BodyTooLarge, ClientDisconnected, MedialaneError, ModelUnavailable

logger = logging.getLogger(__name__)

_MODEL = b"model="
#: Of a body that is passed on unread, whose limit the gateway knows.
_NO_LIMIT = 1 << 62

#: A handshake, which the server has answered to parse it.
_HANDSHAKE = (
    (b"connection", b"Upgrade"),
    (b"upgrade", b"websocket"),
    (b"sec-websocket-version", b"13"),
    (b"sec-websocket-key", b"bWVkaWFsYW5lLXJvdXRlcg=="),
)


class Exchange:
    """`path` is that of the request without `root_path`, `asked` the model in its query."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, root_path: str) -> None:
        self.scope = scope
        self.path: str = scope["path"].removeprefix(root_path)
        self.is_websocket: bool = scope["type"] == "websocket"
        self.method: str = "GET" if self.is_websocket else scope["method"]
        self.asked = _asked_model(scope["query_string"])
        self.has_body = self.method not in WITHOUT_BODY and (
            self.header(b"content-length") not in (b"", b"0") or bool(self.header(b"transfer-encoding"))
        )
        self.receive = receive
        self._send = send
        self._body: StreamedBody | None = None

    def header(self, name: bytes) -> bytes:
        return header(self.scope, name)

    def headers(self) -> Headers:
        """Return the headers that a gateway gets, with the client's address."""
        removed = {CLIENT_HEADER} if self.has_body else {CLIENT_HEADER, b"content-length"}
        headers = [each for each in end_to_end(self.scope["headers"]) if each[0] not in removed]
        if self.is_websocket:
            headers = [each for each in headers if not each[0].startswith(b"sec-websocket-")] + list(_HANDSHAKE)
        return [*headers, address_header(self.scope)]

    def target(self, *, named: bool) -> bytes:
        """Return path and query as they came; unless it is `named`, without the model: some endpoints of a gateway
        refuse what they do not know."""
        path: bytes = self.scope["raw_path"]
        query: bytes = self.scope["query_string"]
        if self.asked is not None and not named:
            query = b"&".join(pair for pair in query.split(b"&") if not pair.startswith(_MODEL))
        return path + b"?" + query if query else path

    async def find_model(self, memory: BodyMemory, config: GatewayConfig, limit: int) -> str | None:
        """Read the body, of at most `limit` bytes, until it names the model; None if it does not. What was read is
        charged to `memory` until a gateway has it. Raises ClientDisconnected, TooLarge, BodyMemoryExhausted,
        ClientTooSlow."""
        declared = self.header(b"content-length")
        if declared.isdigit() and int(declared) > limit:
            raise BodyTooLarge(f"the request body has {int(declared)} bytes, more than {limit}")
        self._body = self._open_body(memory, config, limit)
        return await self._body.find(search_of(self.header(b"content-type")))

    async def forward(self, model: Model, memory: BodyMemory, config: GatewayConfig, *, named: bool = False) -> None:
        """Pass the request on, and the answer back, in pieces as they come. Ends with the client's connection. Raises
        ModelUnavailable, and what `find_model` raises."""
        if self.has_body and self._body is None:
            self._body = self._open_body(memory, config, _NO_LIMIT)
        body = self._body
        request = GatewayRequest(
            self.method,
            self.target(named=named),
            self.headers(),
            None if body is None else body.pieces(),
            expects_continue=self.header(b"expect").lower() == b"100-continue",
        )
        relay = _Relay(model, self._send)
        try:
            if body is None:
                await until_gone(self.receive, relay.run(request))
            else:
                await first_of(relay.run(request), body.until_gone())
        except (aiohttp.ClientError, TimeoutError) as error:
            relay.failed(error, None if body is None else body.error)

    def close(self) -> None:
        """Release the memory of what was read. Idempotent."""
        if self._body is not None:
            self._body.close()

    def _open_body(self, memory: BodyMemory, config: GatewayConfig, limit: int) -> StreamedBody:
        charge = BudgetCharge(memory)
        return StreamedBody(self.receive, BoundedReceive(self.receive, limit, charge, config), charge)


class _Relay:
    """Passes one answer back."""

    def __init__(self, model: Model, send: Send) -> None:
        self._model = model
        self._send = send
        self._has_started = False

    async def run(self, request: GatewayRequest) -> None:
        """Raises ModelUnavailable, aiohttp.ClientError."""
        async with self._model.gateways.opened(request) as response:
            headers = end_to_end(response.raw_headers)
            if response.status in WITHOUT_LENGTH:
                headers = [each for each in headers if each[0].lower() != b"content-length"]
            self._has_started = True
            await self._send({"type": "http.response.start", "status": response.status, "headers": headers})
            async for piece in response.content.iter_any():
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def failed(self, error: Exception, of_body: MedialaneError | None) -> None:
        """The client, or the gateway, was lost: raise what the client gets, unless its response has begun, which gets
        no end then (the server closes its connection)."""
        if of_body is None:
            logger.warning("a gateway of %s was lost during a request: %r", self._model.label, error)
        if not self._has_started:
            raise of_body or ModelUnavailable("the model's gateway was lost before it has answered") from error


def _asked_model(query: bytes) -> str | None:
    values = (pair.removeprefix(_MODEL) for pair in query.split(b"&") if pair.startswith(_MODEL))
    value = next(values, None)
    return None if value is None else unquote_plus(value.decode("latin-1"))


class StreamedBody:
    """What was read is kept, charged to the memory of all bodies, until a gateway takes it. `error` is why reading has
    failed after a gateway was asked, which aiohttp does not report. Reading raises ClientDisconnected, BodyTooLarge,
    BodyMemoryExhausted and ClientTooSlow."""

    def __init__(self, receive: Receive, bounded: BoundedReceive, charge: BudgetCharge) -> None:
        self._receive = receive
        self._bounded = bounded
        self._charge = charge
        self._kept: deque[bytes] = deque()
        self._has_more = True
        self._is_sent = asyncio.Event()
        self.error: MedialaneError | None = None

    async def find(self, search: ModelSearch) -> str | None:
        """Read until the search ends; return the model's name."""
        while self._has_more and not search.is_over:
            piece = await self._next()
            search.feed(piece)
            self._kept.append(piece)
        return search.name

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield what was kept, then the rest as it comes."""
        while self._kept:
            yield self._kept.popleft()
        self._bounded.keeps = False
        try:
            while self._has_more:
                if piece := await self._next():
                    yield piece
        except MedialaneError as error:
            self.error = error
            raise
        self.close()
        self._is_sent.set()

    async def until_gone(self) -> None:
        """Wait until the client has disconnected, once its body is sent: before that, `pieces` notices it."""
        await self._is_sent.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def close(self) -> None:
        """Idempotent."""
        self._kept.clear()
        self._charge.release()

    async def _next(self) -> bytes:
        message = await self._bounded()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected("the client has disconnected")
        self._has_more = bool(message.get("more_body", False))
        piece: bytes = message.get("body", b"")
        return piece
