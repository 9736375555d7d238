"""The ASGI app of the process in front of several models: finds the model of a request, and passes it on.

Theory of operation. The name is in the query (`?model=NAME`), otherwise it is the member or field `model` of the body,
which is read no further than that (`model_name`). The gateways check keys. To keep others from filling the memory, a
body is read here only for callers that have some key of this server; and what answers for several models asks each with
the caller's own key. A request that names no model is refused: vLLM's default, its first name, would let a client get
the answer of a model that it did not mean.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_plus

import aiohttp

from medialane.gateway.config import GatewayConfig
from medialane.gateway.http.access import (
    PAGE_PATH,
    AccessKeys,
    RouteKind,
    given_key,
    refuse_websocket,
    send_unauthorized,
)
from medialane.gateway.http.responses import (
    REQUEST_ID,
    WITHOUT_LENGTH,
    IdentifiedSend,
    error_form,
    given_id,
    header,
    send_error,
    usable_id,
)
from medialane.gateway.http.server import CLIENT_HEADER, address_header
from medialane.gateway.intake import WITHOUT_BODY, BodyMemory, BoundedReceive, BudgetCharge
from medialane.gateway.models.model_name import ModelSearch, search_of
from medialane.gateway.models.served_models import (
    GatewayRequest,
    Headers,
    Model,
    OfAllModels,
    RefusedByModel,
    ServedModels,
    end_to_end,
    send_body,
)
from medialane.observability.logging import request_id
from medialane.runtime.tasks import first_of
from medialane.types.errors import BodyTooLarge, ClientDisconnected, MedialaneError, ModelRequired, ModelUnavailable

if TYPE_CHECKING:  # types only: starlette is installed with vLLM
    from starlette.types import Receive, Scope, Send

logger = logging.getLogger(__name__)

_MODEL = b"model="

#: Of a body that is passed on unread, whose limit the gateway knows.
_NO_LIMIT = 1 << 62


class Exchange:
    """`path` is the request's without `root_path`, `asked` the model in its query. What is read of its body is
    charged to `memory` until a gateway has it."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, *, memory: BodyMemory, config: GatewayConfig, root_path: str
    ) -> None:
        self.scope = scope
        self.path: str = scope["path"].removeprefix(root_path)
        self.method: str = scope["method"]
        self.asked = _asked_model(scope["query_string"])
        self.has_body = self.method not in WITHOUT_BODY and (
            self.header(b"content-length") not in (b"", b"0") or bool(self.header(b"transfer-encoding"))
        )
        self.receive = receive
        self._send = send
        self._memory = memory
        self._config = config
        self._body: StreamedBody | None = None
        self._has_started = False

    def header(self, name: bytes) -> bytes:
        return header(self.scope, name)

    def headers(self) -> Headers:
        """Return the headers that a gateway gets, with the client's address."""
        removed = {CLIENT_HEADER} if self.has_body else {CLIENT_HEADER, b"content-length"}
        headers = [each for each in end_to_end(self.scope["headers"]) if each[0] not in removed]
        return [*headers, address_header(self.scope)]

    def target(self, *, named: bool) -> bytes:
        """Return path and query as they came; unless it is `named`, without the model: some endpoints of a gateway
        refuse what they do not know."""
        path: bytes = self.scope["raw_path"]
        query: bytes = self.scope["query_string"]
        if self.asked is not None and not named:
            query = b"&".join(pair for pair in query.split(b"&") if not pair.startswith(_MODEL))
        return path + b"?" + query if query else path

    async def find_model(self, limit: int) -> str | None:
        """Read the body, of at most `limit` bytes, until it names the model; None if it does not. Raises
        ClientDisconnected, BodyTooLarge, BodyMemoryExhausted, ClientTooSlow."""
        declared = self.header(b"content-length")
        if declared.isdigit() and int(declared) > limit:
            raise BodyTooLarge(f"the request body has {int(declared)} bytes, more than {limit}")
        if (search := search_of(self.header(b"content-type"))) is None:
            return None
        self._body = self._open_body(limit)
        return await self._body.find(search)

    async def forward(self, model: Model, *, named: bool = False) -> None:
        """Pass the request on, and the answer back, in pieces as they come. Ends with the client's connection. Raises
        ModelUnavailable, and what `find_model` raises."""
        if self.has_body and self._body is None:
            self._body = self._open_body(_NO_LIMIT)
        body = self._body
        request = GatewayRequest(
            self.method,
            self.target(named=named),
            self.headers(),
            None if body is None else body.pieces(),
            expects_continue=self.header(b"expect").lower() == b"100-continue",
        )
        try:
            if body is None:
                await _until_gone(self.receive, self._relay(model, request))
            else:
                await first_of(self._relay(model, request), body.until_gone())
        except (aiohttp.ClientError, TimeoutError) as error:
            of_body = None if body is None else body.error
            if of_body is None:
                logger.warning("a gateway of %s was lost during a request: %r", model.label, error)
            if not self._has_started:  # else the response gets no end: the server closes its connection
                raise of_body or ModelUnavailable("the model's gateway was lost before it has answered") from error

    def close(self) -> None:
        """Release the memory of what was read. Idempotent."""
        if self._body is not None:
            self._body.close()

    async def _relay(self, model: Model, request: GatewayRequest) -> None:
        """Raises ModelUnavailable, aiohttp.ClientError."""
        async with model.opened(request) as response:
            headers = end_to_end(response.raw_headers)
            if response.status in WITHOUT_LENGTH:
                headers = [each for each in headers if each[0].lower() != b"content-length"]
            self._has_started = True
            await self._send({"type": "http.response.start", "status": response.status, "headers": headers})
            async for piece in response.content.iter_any():
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def _open_body(self, limit: int) -> StreamedBody:
        charge = BudgetCharge(self._memory)
        return StreamedBody(self.receive, BoundedReceive(self.receive, limit, charge, self._config), charge)


async def _until_gone(receive: Receive, work: Awaitable[None]) -> None:
    """Await `work`, which answers a request whose body was read, unless the client disconnects before."""

    async def gone() -> None:
        while not (await receive())["type"].endswith(".disconnect"):
            pass

    await first_of(work, gone())


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


#: The same for every model, so that any may answer.
_OF_ANY = frozenset({"/version", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json", PAGE_PATH})


class NameRouter:
    """`max_body_bytes` is the largest body that any of the models accepts."""

    def __init__(
        self,
        models: ServedModels,
        keys: AccessKeys,
        config: GatewayConfig,
        *,
        max_body_bytes: int,
        root_path: str = "",
    ) -> None:
        self._models = models
        self._keys = keys
        self._config = config
        self._max_body_bytes = max_body_bytes
        self._root_path = root_path
        self._memory = BodyMemory(config.max_bodies_bytes)
        self._of_all = OfAllModels(models)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await refuse_websocket(send)
            return
        exchange = Exchange(scope, receive, send, memory=self._memory, config=self._config, root_path=self._root_path)
        id_token = request_id.set(usable_id(given_id(scope)))
        own = IdentifiedSend(send, request_id.get())
        try:
            await self._serve(exchange, own)
        except ClientDisconnected:
            return
        except RefusedByModel as refused:
            await send_body(own, refused.answer.status, refused.answer.body, refused.answer.content_type)
        except MedialaneError as error:
            logger.info("%s %s: %s", exchange.method, exchange.path, error.message)
            await send_error(own, error, error_form({**scope, "path": exchange.path}))
        finally:
            exchange.close()
            request_id.reset(id_token)

    async def _serve(self, exchange: Exchange, own: Send) -> None:
        """Raises MedialaneError for what no gateway has answered. `own` sends an answer of our own."""
        name = exchange.asked
        if name is None:
            answer = self._of_all.handler(exchange.method, exchange.path)
            if answer is not None:
                return await _until_gone(exchange.receive, answer(_identified(exchange), own))
            if _is_of_any(exchange):
                return await self._forward(exchange, self._models.any_serving())
        may_send = self._may_send(exchange)
        if name is None and exchange.has_body and may_send:
            name = await exchange.find_model(self._max_body_bytes)
        model = self._models.find(name)
        if model is None and not may_send:
            return await send_unauthorized(own)
        if not name:
            raise self._model_required(exchange)
        if model is None:
            model = await self._find_adapter(name, exchange)
        if model is None:
            return await self._send_missing(name, exchange.path, own)
        return await self._forward(exchange, model)

    async def _forward(self, exchange: Exchange, model: Model) -> None:
        await exchange.forward(model, named=exchange.asked is not None and exchange.asked not in model.names)

    async def _find_adapter(self, name: str, exchange: Exchange) -> Model | None:
        """Ask the models for the adapters that they have loaded since they were asked last."""
        await self._of_all.learn_names(_identified(exchange))
        return self._models.find(name)

    async def _send_missing(self, name: str, path: str, own: Send) -> None:
        body = json.dumps(missing_model(path, name, self._models.names), separators=(",", ":"), ensure_ascii=False)
        await send_body(own, 404, body.encode())

    def _model_required(self, exchange: Exchange) -> ModelRequired:
        names = ", ".join(self._models.names)
        if exchange.has_body:
            where = "`model` of the body, a string, must name one of them"
        else:
            where = f"{exchange.method} {exchange.path} concerns one: name it in the query (?model=NAME)"
        return ModelRequired(f"this server has several models, and {where}: {names}", param="model")

    def _may_send(self, exchange: Exchange) -> bool:
        """Return whether the caller has a key that some path needs."""
        given, kinds = given_key(exchange.scope), (RouteKind.CLIENT, RouteKind.ADMIN)
        return self._keys.is_open(RouteKind.CLIENT) or any(self._keys.accepts(kind, given) for kind in kinds)


def _identified(exchange: Exchange) -> Headers:
    """Return the headers of what is asked on behalf of a request: if it is refused, that has the request's id."""
    others = [each for each in exchange.headers() if each[0] != REQUEST_ID]
    return [*others, (REQUEST_ID, request_id.get().encode())]


def _is_of_any(exchange: Exchange) -> bool:
    """Return whether every model would give the same answer. A file of the page has a suffix, other paths have none."""
    is_file = exchange.path.startswith(PAGE_PATH) and "." in exchange.path.removeprefix(PAGE_PATH)
    return exchange.path in _OF_ANY or exchange.method == "OPTIONS" or is_file


#: Their endpoints find that the name is no adapter's either (`_maybe_get_adapters`), and do not list the others.
_POOLING = frozenset({
    "/pooling", "/classify", "/score", "/rerank", "/v1/embeddings", "/v1/score", "/v1/rerank", "/v2/rerank",
    "/v2/embed",
})  # fmt: skip

_ANTHROPIC = frozenset({"/v1/messages", "/v1/messages/count_tokens"})


def missing_model(path: str, name: str, served: Sequence[str]) -> dict[str, Any]:
    """Return the body of the response, whose status is 404."""
    message, param = f"The model `{name}` does not exist.", None
    if path not in _POOLING:
        message, param = f"{message} Valid aliases: {', '.join(served)}.", "model"
    if path in _ANTHROPIC:
        return {"type": "error", "error": {"type": "NotFoundError", "message": message}}
    return {"error": {"message": message, "type": "NotFoundError", "param": param, "code": 404}}
