"""The ASGI app of the process in front of several models: finds the model of a request, and passes it on.

Theory of operation. The name is that of the query (`?model=NAME`), or else the member or field `model` of the body,
which is read no further than that (`model_name`). The gateways check keys. To keep others from filling the memory, a
body is read here only for callers that have some key of this server; and what answers for several models asks each with
the caller's own key. A request that names no model is refused: vLLM's default, its first name, would let a client get
the answer of a model that it did not mean.

Websockets are passed on as the requests that they begin with: gateways answer those, and accept none.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

from medialane.gateway.config import GatewayConfig
from medialane.gateway.http.access import (
    LOGIN_PATH,
    LOGOUT_PATH,
    PAGE_PATH,
    AccessKeys,
    RouteKind,
    given_key,
    responding,
    send_unauthorized,
)
from medialane.gateway.http.asgi import until_gone
from medialane.gateway.http.responses import REQUEST_ID, IdentifiedSend, error_form, given_id, send_error, usable_id
from medialane.gateway.intake import BodyMemory, Receive
from medialane.gateway.middleware import Scope, Send
from medialane.gateway.models.all_models import OfAllModels, send_body
from medialane.gateway.models.exchange import Exchange
from medialane.gateway.models.served_models import Headers, Model, ServedModels
from medialane.observability.logging import request_id
from medialane.types.errors import ClientDisconnected, MedialaneError, ModelRequired

logger = logging.getLogger(__name__)

#: The same for every model, so that any may answer.
_OF_ANY = frozenset({
    "/version", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json", PAGE_PATH, LOGIN_PATH, LOGOUT_PATH,
})  # fmt: skip


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
        if scope["type"] == "websocket":
            await receive()  # websocket.connect
        send = responding(scope, send)
        exchange = Exchange(scope, receive, send, root_path=self._root_path)
        id_token = request_id.set(usable_id(given_id(scope)))
        own = IdentifiedSend(send, request_id.get())
        try:
            await self._serve(exchange, own)
        except ClientDisconnected:
            return
        except MedialaneError as error:
            logger.info("%s %s: %s", exchange.method, exchange.path, error.message)
            await send_error(own, error, error_form({**scope, "path": exchange.path}))
        finally:
            exchange.close()
            request_id.reset(id_token)

    async def _serve(self, exchange: Exchange, own: Send) -> None:
        """Raises MedialaneError for what no gateway has answered. `own` sends an answer that is none of theirs."""
        name = exchange.asked
        if name is None:
            answer = self._of_all.handler(exchange.method, exchange.path)
            if answer is not None:
                return await until_gone(exchange.receive, answer(exchange.scope, _identified(exchange), own))
            if _is_of_any(exchange):
                return await self._forward(exchange, self._models.any_serving())
        may_send = self._may_send(exchange)
        if name is None and exchange.has_body and may_send:
            name = await exchange.find_model(self._memory, self._config, self._max_body_bytes)
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
        named = exchange.asked is not None and exchange.asked not in model.names
        await exchange.forward(model, self._memory, self._config, named=named)

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
    return exchange.path in _OF_ANY or exchange.is_websocket or exchange.method == "OPTIONS" or is_file


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
