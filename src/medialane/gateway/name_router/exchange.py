"""One request of a client, and its way to a gateway."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from urllib.parse import unquote_plus

import aiohttp

from medialane.gateway.bodies import WITHOUT_BODY, BodyMemory, BoundedReceive, BudgetCharge, Receive
from medialane.gateway.client_address import HEADER as CLIENT
from medialane.gateway.client_address import address_header
from medialane.gateway.config import GatewayConfig
from medialane.gateway.middleware import Scope, Send
from medialane.gateway.name_router.gateways import Headers, Request, end_to_end
from medialane.gateway.name_router.model_name import search_of
from medialane.gateway.name_router.request_body import RequestBody
from medialane.gateway.name_router.served_models import Model
from medialane.runtime.tasks import first_of
from medialane.types.errors import BodyTooLarge, MedialaneError, ModelUnavailable

logger = logging.getLogger(__name__)

_MODEL = b"model="
_WITHOUT_LENGTH = (204, 304)
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
        self._receive = receive
        self._send = send
        self._body: RequestBody | None = None

    def header(self, name: bytes) -> bytes:
        return next((value for key, value in self.scope["headers"] if key == name), b"")

    def headers(self) -> Headers:
        """Return those that a gateway gets, with the client's address."""
        removed = {CLIENT} if self.has_body else {CLIENT, b"content-length"}
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
        request = Request(
            self.method,
            self.target(named=named),
            self.headers(),
            None if body is None else body.pieces(),
            expects_continue=self.header(b"expect").lower() == b"100-continue",
        )
        relay = _Relay(model, self._send)
        try:
            if body is None:
                await self.until_gone(relay.run(request))
            else:
                await first_of(relay.run(request), body.until_gone())
        except (aiohttp.ClientError, TimeoutError) as error:
            relay.failed(error, None if body is None else body.error)

    async def until_gone(self, work: Awaitable[None]) -> None:
        """Await `work`, which answers a request without a body, unless the client disconnects before."""

        async def gone() -> None:
            while not (await self._receive())["type"].endswith(".disconnect"):
                pass

        await first_of(work, gone())

    def close(self) -> None:
        """Release the memory of what was read. Idempotent."""
        if self._body is not None:
            self._body.close()

    def _open_body(self, memory: BodyMemory, config: GatewayConfig, limit: int) -> RequestBody:
        charge = BudgetCharge(memory)
        return RequestBody(self._receive, BoundedReceive(self._receive, limit, charge, config), charge)


class _Relay:
    """Passes one answer back."""

    def __init__(self, model: Model, send: Send) -> None:
        self._model = model
        self._send = send
        self._has_started = False

    async def run(self, request: Request) -> None:
        """Raises ModelUnavailable, aiohttp.ClientError."""
        async with self._model.gateways.opened(request) as response:
            headers = end_to_end(response.raw_headers)
            if response.status in _WITHOUT_LENGTH:
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
