"""What is answered for all models: each is asked with the caller's own headers, and their answers are put together.

Whom a model refuses (401, 403) gets its refusal: all of them have the same keys. A model that does not answer is left
out; if none does, the answer is 503.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, NamedTuple

import aiohttp
import msgspec

from medialane.core.errors import MedialaneError, ModelUnavailable, Unavailable
from medialane.core.tasks import gather_or_cancel
from medialane.gateway.gateway_metrics import merge
from medialane.gateway.health import Health
from medialane.gateway.middleware import Scope, Send
from medialane.gateway.name_router.gateways import Headers, Request
from medialane.gateway.name_router.metrics_page import labelled, up_page
from medialane.gateway.name_router.served_models import Model, ServedModels
from medialane.gateway.operators.endpoints import (
    INTERVAL_S,
    MAX_LIMIT,
    MAX_STREAMS,
    REQUESTS_PATH,
    STATE_PATH,
    STREAM_PATH,
)
from medialane.gateway.scrape import PATH as METRICS_PATH

logger = logging.getLogger(__name__)

MODELS_PATH = "/v1/models"
_HEALTH_PATHS = frozenset({"/health", "/ping"})
#: Longer than a gateway waits for its workers when it is scraped.
_TIMEOUT_S = 5.0
_MAX_ANSWER_BYTES = 64 << 20
#: An answer is put together from plain text, and each model gives its own.
_NEGOTIATED = frozenset({b"accept", b"accept-encoding", b"if-none-match"})

Handler = Callable[[Scope, Headers, Send], Awaitable[None]]


class _Answer(NamedTuple):
    model: Model
    status: int
    body: bytes
    content_type: bytes


class _ModelList(msgspec.Struct):
    object: Literal["list"] = "list"
    data: list[msgspec.Raw] = []


class _Named(msgspec.Struct):
    id: str


class OfAllModels:
    def __init__(self, models: ServedModels, *, is_stopping: Callable[[], bool] = bool) -> None:
        self._models = models
        self._is_stopping = is_stopping
        self._num_streams = 0

    def handler(self, method: str, path: str) -> Handler | None:
        """Return what answers a request that names no model; None if that must name one."""
        if path in _HEALTH_PATHS:
            return self._send_health
        if method != "GET":
            return None
        if path.startswith(METRICS_PATH):
            return self._send_metrics
        if path.startswith(f"{REQUESTS_PATH}/"):
            return self._send_request
        return {
            MODELS_PATH: self._send_models,
            STATE_PATH: self._send_state,
            STREAM_PATH: self._send_stream,
            REQUESTS_PATH: self._send_requests,
        }.get(path)

    async def learn_names(self, headers: Headers) -> None:
        """Ask all models for their names, adapters included."""
        for answer in await self._ask_all(MODELS_PATH.encode(), headers):
            if answer is not None and answer.status == 200:
                self._learn(answer)

    async def _send_models(self, _scope: Scope, headers: Headers, send: Send) -> None:
        answers = await self._answered(MODELS_PATH.encode(), headers)
        if isinstance(answers, _Answer):
            return await _pass_on(answers, send)
        cards = [card for answer in answers for card in self._learn(answer)]
        await send_body(send, 200, msgspec.json.encode(_ModelList(data=cards)))

    def _learn(self, answer: _Answer) -> list[msgspec.Raw]:
        cards = msgspec.json.decode(answer.body, type=_ModelList).data
        self._models.learn(answer.model, [msgspec.json.decode(card, type=_Named).id for card in cards])
        return cards

    async def _send_metrics(self, _scope: Scope, headers: Headers, send: Send) -> None:
        answers = await self._ask_all(METRICS_PATH.encode(), headers)
        refused = next((answer for answer in answers if answer is not None and answer.status in (401, 403)), None)
        if refused is not None:
            return await _pass_on(refused, send)
        served = [answer for answer in answers if answer is not None and answer.status == 200]
        up = {model.names[0]: any(answer.model is model for answer in served) for model in self._models}
        pages = [await asyncio.to_thread(labelled, answer.body, answer.model.names[0]) for answer in served]
        kind = served[0].content_type if served else b"text/plain; version=0.0.4; charset=utf-8"
        await send_body(send, 200, merge([*pages, up_page(up)]), kind)

    async def _send_health(self, _scope: Scope, headers: Headers, send: Send) -> None:
        answers = await self._ask_all(b"/health", headers)
        reports = [_health(answer) for answer in answers]
        problems = tuple(
            f"{model.label}: {problem}"
            for model, report in zip(self._models, reports, strict=True)
            for problem in report.problems or ((report.status,) if report.status != "ok" else ())
        )
        if all(report.status == "unavailable" for report in reports):
            health = Health("unavailable", problems)
        else:
            health = Health("degraded" if problems else "ok", problems)
        status, body = health.response()
        await send_body(send, status, body)

    async def _send_state(self, scope: Scope, headers: Headers, send: Send) -> None:
        if b"text/event-stream" in dict(headers).get(b"accept", b""):
            return await self._send_stream(scope, headers, send)
        answers = await self._state(scope, headers)
        if isinstance(answers, _Answer):
            return await _pass_on(answers, send)
        await send_body(send, 200, answers)

    async def _send_stream(self, scope: Scope, headers: Headers, send: Send) -> None:
        if self._num_streams >= MAX_STREAMS:
            raise Unavailable(f"{MAX_STREAMS} streams of the state are open", retry_after_s=5)
        self._num_streams += 1
        try:
            document = await self._state(scope, headers)
            if isinstance(document, _Answer):
                return await _pass_on(document, send)
            event_headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
            event_headers.append((b"x-accel-buffering", b"no"))
            await send({"type": "http.response.start", "status": 200, "headers": event_headers})
            await send({"type": "http.response.body", "body": b"retry: 1000\n\n", "more_body": True})
            while not (self._is_stopping() or isinstance(document, _Answer)):
                event = b"event: state\ndata: " + document + b"\n\n"
                await send({"type": "http.response.body", "body": event, "more_body": True})
                await asyncio.sleep(INTERVAL_S)
                document = await self._state(scope, headers)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._num_streams -= 1

    async def _state(self, scope: Scope, headers: Headers) -> bytes | _Answer:
        """Return the document of all models, or the refusal of one."""
        query: bytes = scope["query_string"]
        answers = await self._ask_all(STATE_PATH.encode() + (b"?" + query if query else b""), headers)
        wrong = next((answer for answer in answers if answer is not None and answer.status not in (200, 503)), None)
        if wrong is not None:
            return wrong
        states = [
            {"name": model.label, "names": model.names, "state": None if answer is None else _raw(answer)}
            for model, answer in zip(self._models, answers, strict=True)
        ]
        return msgspec.json.encode({"models": states})

    async def _send_requests(self, scope: Scope, headers: Headers, send: Send) -> None:
        query: bytes = scope["query_string"]
        answers = await self._answered(REQUESTS_PATH.encode() + (b"?" + query if query else b""), headers)
        if isinstance(answers, _Answer):
            return await _pass_on(answers, send)
        listed: list[Mapping[str, Any]] = []
        missing: list[str] = []
        for answer in answers:
            found = json.loads(answer.body)
            listed += found["requests"]
            missing += [f"{answer.model.label} {index}" for index in found["gateways_missing"]]
        listed.sort(key=lambda view: (view.get("stage") is not None, view["received_at"]), reverse=True)
        longest = max((len(json.loads(answer.body)["requests"]) for answer in answers), default=MAX_LIMIT)
        await send_body(send, 200, msgspec.json.encode({"requests": listed[:longest], "gateways_missing": missing}))

    async def _send_request(self, scope: Scope, headers: Headers, send: Send) -> None:
        answers = await self._ask_all(scope["raw_path"], headers)
        known = [answer for answer in answers if answer is not None]
        if not known:
            raise _no_model()
        await _pass_on(next((answer for answer in known if answer.status == 200), known[0]), send)

    async def _answered(self, target: bytes, headers: Headers) -> list[_Answer] | _Answer:
        """Return the answers of the models that serve, or the first one if none has succeeded. Raises
        ModelUnavailable."""
        answers = [answer for answer in await self._ask_all(target, headers) if answer is not None]
        if not answers:
            raise _no_model()
        refused = next((answer for answer in answers if answer.status in (400, 401, 403)), None)
        return refused or [answer for answer in answers if answer.status == 200] or answers[0]

    async def _ask_all(self, target: bytes, headers: Headers) -> tuple[_Answer | None, ...]:
        """Return the answers in the order of the models; None of one that does not answer."""
        plain = [each for each in headers if each[0] not in _NEGOTIATED]
        return await gather_or_cancel([self._ask(model, Request("GET", target, plain)) for model in self._models])

    async def _ask(self, model: Model, request: Request) -> _Answer | None:
        try:
            async with model.gateways.opened(request, total_s=_TIMEOUT_S) as response:
                body = bytearray()
                async for piece in response.content.iter_any():
                    body += piece
                    if len(body) > _MAX_ANSWER_BYTES:
                        return None
                kind = response.headers.get("Content-Type", "application/json")
                return _Answer(model, response.status, bytes(body), kind.encode("latin-1"))
        except (aiohttp.ClientError, TimeoutError, MedialaneError) as error:
            logger.debug("%s does not answer: %r", model.label, error)
            return None


def _no_model() -> ModelUnavailable:
    return ModelUnavailable("no model serves yet")


def _raw(answer: _Answer) -> msgspec.Raw | None:
    return msgspec.Raw(answer.body) if answer.status == 200 else None


def _health(answer: _Answer | None) -> Health:
    """Return what a gateway says of itself."""
    if answer is None:
        return Health("unavailable", ("its gateways do not answer",))
    if not answer.body:
        return Health("ok" if answer.status == 200 else "unavailable")
    try:
        return msgspec.json.decode(answer.body, type=Health)
    except msgspec.DecodeError:
        return Health("unavailable", (f"/health has status {answer.status}",))


async def _pass_on(answer: _Answer, send: Send) -> None:
    await send_body(send, answer.status, answer.body, answer.content_type)


async def send_body(send: Send, status: int, body: bytes, content_type: bytes = b"application/json") -> None:
    headers = [(b"content-length", str(len(body)).encode())]
    if body:
        headers += [(b"content-type", content_type), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
