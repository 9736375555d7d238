"""The ASGI app of the process in front of several models: finds the model of a request, and passes it on.

Theory of operation. The name is that of the query (`?model=NAME`), or else the member or field `model` of the body,
which is read no further than that (`model_name`). The gateways check keys. To keep others from filling the memory, a
body is read here only for callers that have some key of this server; and what answers for several models asks each with
the caller's own key. A request that names no model is refused: vLLM's default, its first name, would let a client get
the answer of a model that it did not mean.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from urllib.parse import unquote_plus

import aiohttp

from medialane.core.errors import BodyTooLarge, ClientDisconnected, MedialaneError, ModelRequired, ModelUnavailable
from medialane.core.tasks import first_of
from medialane.gateway.access import AccessKeys, Kind, given_key, send_unauthorized
from medialane.gateway.bodies import BodyMemory, BoundedReceive, BudgetCharge, Message, Receive
from medialane.gateway.client_address import HEADER as CLIENT
from medialane.gateway.client_address import address_header
from medialane.gateway.config import GatewayConfig
from medialane.gateway.error_responses import error_form, send_error
from medialane.gateway.middleware import Scope, Send
from medialane.gateway.name_router.gateways import Headers, Request, end_to_end
from medialane.gateway.name_router.missing_model import missing_model
from medialane.gateway.name_router.model_name import search_of
from medialane.gateway.name_router.of_all_models import OfAllModels, send_body
from medialane.gateway.name_router.request_body import RequestBody
from medialane.gateway.name_router.served_models import Model, ServedModels
from medialane.gateway.operators.endpoints import LOGIN_PATH, LOGOUT_PATH
from medialane.gateway.operators.page_files import PAGE_PATH
from medialane.gateway.request_id import IdentifiedSend, given_id, usable_id
from medialane.observability.logging import request_id

logger = logging.getLogger(__name__)

#: The same for every model, so that any may answer.
_OF_ANY = frozenset({
    "/version", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json", PAGE_PATH, LOGIN_PATH, LOGOUT_PATH,
})  # fmt: skip
_MODEL = b"model="
_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS"})


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
        is_stopping: Callable[[], bool] = bool,
    ) -> None:
        self._models = models
        self._keys = keys
        self._config = config
        self._max_body_bytes = max_body_bytes
        self._root_path = root_path
        self._memory = BodyMemory(config.max_bodies_bytes)
        self._of_all = OfAllModels(models, is_stopping=is_stopping)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        id_token = request_id.set(usable_id(given_id(scope)))
        own = IdentifiedSend(_as_handshake(send) if scope["type"] == "websocket" else send, request_id.get())
        form = error_form({**scope, "path": self._path(scope)})
        try:
            await self._serve(scope, receive, send, own)
        except ClientDisconnected:
            return
        except MedialaneError as error:
            logger.info("%s %s: %s", scope.get("method", "websocket"), scope["path"], error.message)
            await send_error(own, error, form)
        finally:
            request_id.reset(id_token)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, own: Send) -> None:
        """Raises MedialaneError for what no gateway has answered yet. `own` sends an answer that is none of theirs."""
        path, wanted = self._path(scope), _asked_model(scope)
        if scope["type"] == "websocket":
            return await self._refuse_websocket(scope, receive, own)
        answer = self._of_all.handler(scope["method"], path) if wanted is None else None
        if answer is not None:
            return await self._until_gone(receive, answer(scope, self._headers(scope), own))
        charge = BudgetCharge(self._memory)
        body = RequestBody(receive, BoundedReceive(receive, self._max_body_bytes, charge, self._config), charge)
        try:
            has_body = scope["method"] not in _WITHOUT_BODY and _has_body(scope)
            if wanted is None and not self._is_for_any(scope["method"], path):
                if has_body:
                    if not self._may_send(scope):
                        return await send_unauthorized(scope, own)
                    self._check_declared(scope)
                    wanted = await body.find(search_of(_header(scope, b"content-type")))
                if not wanted:
                    raise self._model_required(scope["method"], path, has_body=has_body)
            if wanted is not None and not self._may_send(scope) and self._models.find(wanted) is None:
                return await send_unauthorized(scope, own)
            model = await self._model(wanted, scope)
            if model is None:
                return await self._send_missing(wanted or "", path, own)
            await self._forward(model, scope, body if has_body else None, receive, send)
        finally:
            charge.release()

    async def _model(self, name: str | None, scope: Scope) -> Model | None:
        """Return the model with this name, that of an adapter included; for None any that serves."""
        if name is None:
            return self._models.any_serving()
        if (model := self._models.find(name)) is not None:
            return model
        await self._of_all.learn_names(self._headers(scope))
        return self._models.find(name)

    async def _forward(
        self, model: Model, scope: Scope, body: RequestBody | None, receive: Receive, send: Send
    ) -> None:
        request = Request(
            scope["method"],
            self._target(scope),
            self._headers(scope, has_body=body is not None),
            None if body is None else body.pieces(),
            expects_continue=_header(scope, b"expect").lower() == b"100-continue",
        )
        relay = _Relay(model, send)
        try:
            if body is None:
                await self._until_gone(receive, relay.run(request))
            else:
                await first_of(relay.run(request), body.until_gone())
        except (aiohttp.ClientError, TimeoutError) as error:
            if body is not None and body.error is not None:
                raise body.error from error
            relay.failed(error)

    @staticmethod
    async def _until_gone(receive: Receive, work: Awaitable[None]) -> None:
        """Await `work`, which answers a request without a body, unless the client disconnects before."""

        async def gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        await first_of(work, gone())

    async def _refuse_websocket(self, scope: Scope, receive: Receive, own: Send) -> None:
        """Pass the handshake on as the request that it is: the gateways answer it, and accept none."""
        model = self._models.any_serving()
        await receive()  # websocket.connect
        handshake = [
            (b"connection", b"Upgrade"),
            (b"upgrade", b"websocket"),
            (b"sec-websocket-version", b"13"),
            (b"sec-websocket-key", b"bWVkaWFsYW5lLXJvdXRlcg=="),
        ]
        others = [each for each in self._headers(scope) if not each[0].startswith(b"sec-websocket-")]
        request = Request("GET", self._target(scope), [*others, *handshake])
        relay = _Relay(model, own)
        try:
            await relay.run(request)
        except (aiohttp.ClientError, TimeoutError) as error:
            relay.failed(error)

    async def _send_missing(self, name: str, path: str, own: Send) -> None:
        body = json.dumps(missing_model(path, name, self._models.names), separators=(",", ":"), ensure_ascii=False)
        await send_body(own, 404, body.encode())

    def _model_required(self, method: str, path: str, *, has_body: bool) -> ModelRequired:
        names = ", ".join(self._models.names)
        if has_body:
            return ModelRequired(f"this server has several models: name one of them in `model`: {names}", param="model")
        return ModelRequired(
            f"this server has several models, and {method} {path} concerns one: name it in the query (?model=NAME): "
            f"{names}",
            param="model",
        )

    def _is_for_any(self, method: str, path: str) -> bool:
        return path in _OF_ANY or method == "OPTIONS" or (method == "GET" and _is_page_file(path))

    def _may_send(self, scope: Scope) -> bool:
        given = given_key(scope)
        return self._keys.is_open(Kind.CLIENT) or any(
            self._keys.accepts(kind, given) for kind in (Kind.CLIENT, Kind.ADMIN)
        )

    def _check_declared(self, scope: Scope) -> None:
        declared = _header(scope, b"content-length")
        if declared.isdigit() and int(declared) > self._max_body_bytes:
            raise BodyTooLarge(f"the request body has {int(declared)} bytes, more than {self._max_body_bytes}")

    def _path(self, scope: Scope) -> str:
        path: str = scope["path"].removeprefix(self._root_path)
        return path

    def _headers(self, scope: Scope, *, has_body: bool = False) -> Headers:
        headers = end_to_end(scope["headers"])
        removed = {CLIENT} if has_body else {CLIENT, b"content-length"}
        return [*(each for each in headers if each[0] not in removed), address_header(scope)]

    def _target(self, scope: Scope) -> bytes:
        """Return path and query as they came, without the name of the model: some of our endpoints refuse what they do
        not know. That of an adapter stays: /medialane/requests lists its requests then."""
        query: bytes = scope["query_string"]
        if _asked_model(scope) in self._models.names:
            query = b"&".join(pair for pair in query.split(b"&") if not pair.startswith(_MODEL))
        path: bytes = scope["raw_path"]
        return path + b"?" + query if query else path


class _Relay:
    """Passes one response on."""

    def __init__(self, model: Model, send: Send) -> None:
        self._model = model
        self._send = send
        self._has_started = False

    async def run(self, request: Request) -> None:
        """Raises ModelUnavailable, aiohttp.ClientError."""
        async with self._model.gateways.opened(request) as response:
            headers = end_to_end(response.raw_headers)
            if response.status in (204, 304):
                headers = [each for each in headers if each[0].lower() != b"content-length"]
            self._has_started = True
            await self._send({"type": "http.response.start", "status": response.status, "headers": headers})
            async for piece in response.content.iter_any():
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def failed(self, error: Exception) -> None:
        """The gateway was lost: the client gets an error, or, if its response has begun, no end of that (the server
        closes its connection)."""
        logger.warning("a gateway of %s was lost during a request: %r", self._model.label, error)
        if not self._has_started:
            raise ModelUnavailable("the model's gateway was lost before it has answered") from error


def _asked_model(scope: Scope) -> str | None:
    query: bytes = scope["query_string"]
    values = (pair.removeprefix(_MODEL) for pair in query.split(b"&") if pair.startswith(_MODEL))
    value = next(values, None)
    return None if value is None else unquote_plus(value.decode("latin-1"))


def _has_body(scope: Scope) -> bool:
    return _header(scope, b"content-length") not in (b"", b"0") or bool(_header(scope, b"transfer-encoding"))


def _is_page_file(path: str) -> bool:
    folder, _, name = path.rpartition("/")
    return f"{folder}/" == PAGE_PATH and "." in name


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _as_handshake(send: Send) -> Send:
    async def send_response(message: Message) -> None:
        await send({**message, "type": f"websocket.{message['type']}"})

    return send_response
