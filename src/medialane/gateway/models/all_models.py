"""What is answered for all models: each is asked with the caller's own headers, and their answers are put together.

Whom a model refuses gets its refusal: all of them have the same keys. A model that does not answer is left out; if none
does, the answer is 503. On the page of metrics, every series has vLLM's label `model_name`.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import aiohttp
import msgspec

from medialane.gateway.http.access import REQUESTS_PATH, STATE_PATH, STREAM_PATH
from medialane.gateway.http.asgi import NO_STORE, StateStreams, send_response
from medialane.gateway.http.health import Health
from medialane.gateway.http.metrics import METRICS_PATH, merge
from medialane.gateway.http.middleware import Scope, Send
from medialane.gateway.models.served_models import GatewayRequest, Headers, Model, ServedModels
from medialane.runtime.tasks import gather_or_cancel
from medialane.types.errors import MedialaneError, ModelUnavailable

logger = logging.getLogger(__name__)

MODELS_PATH = "/v1/models"
_HEALTH_PATHS = frozenset({"/health", "/ping"})
#: Longer than a gateway waits for its workers when it is scraped.
_TIMEOUT_S = 5.0
_MAX_ANSWER_BYTES = 64 << 20
_MAX_LISTED = 1000
#: Not of the question that the models are asked: its caller's body; what is put together is plain text, and complete.
_NOT_ASKED = frozenset({b"content-length", b"content-type", b"accept", b"accept-encoding", b"if-none-match"})
_TEXT = b"text/plain; version=0.0.4; charset=utf-8"
_HAS_LABEL = re.compile(rb'[{,]model_name="')

Handler = Callable[[Scope, Headers, Send], Awaitable[None]]


class _Answer(NamedTuple):
    model: Model
    status: int
    body: bytes
    content_type: bytes = b"application/json"


class _RefusedError(Exception):
    """A model's answer is to be that of all."""

    def __init__(self, answer: _Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer


class _ModelList(msgspec.Struct):
    object: Literal["list"] = "list"
    data: list[msgspec.Raw] = []


class _Card(msgspec.Struct):
    id: str


class _RequestList(msgspec.Struct):
    requests: list[dict[str, Any]]
    gateways_missing: list[str]


class OfAllModels:
    def __init__(self, models: ServedModels, *, is_stopping: Callable[[], bool] = bool) -> None:
        self._models = models
        self._streams = StateStreams(is_stopping)

    def handler(self, method: str, path: str) -> Handler | None:
        """Return what answers a request that names no model; None if that must name one."""
        if path in _HEALTH_PATHS:
            found: Handler | None = self._send_health
        elif method != "GET":
            found = None
        elif path.startswith(METRICS_PATH):
            found = self._send_metrics
        elif path.startswith(f"{REQUESTS_PATH}/"):
            found = self._send_request
        else:
            found = {
                MODELS_PATH: self._send_models,
                STATE_PATH: self._send_state,
                STREAM_PATH: self._send_stream,
                REQUESTS_PATH: self._send_requests,
            }.get(path)
        return None if found is None else _passing_refusals(found)

    async def learn_names(self, headers: Headers) -> None:
        """Ask all models for their names, adapters included."""
        for answer in await self._ask_all(MODELS_PATH, headers):
            if answer is not None and answer.status == 200:
                self._learn(answer)

    def _learn(self, answer: _Answer) -> list[msgspec.Raw]:
        cards = msgspec.json.decode(answer.body, type=_ModelList).data
        self._models.learn(answer.model, [msgspec.json.decode(card, type=_Card).id for card in cards])
        return cards

    async def _send_models(self, _scope: Scope, headers: Headers, send: Send) -> None:
        cards = [card for answer in await self._answers(MODELS_PATH, headers) for card in self._learn(answer)]
        await send_body(send, 200, msgspec.json.encode(_ModelList(data=cards)))

    async def _send_metrics(self, _scope: Scope, headers: Headers, send: Send) -> None:
        answers = await self._answers(METRICS_PATH, headers, may_be_none=True)
        up = {model.names[0]: any(answer.model is model for answer in answers) for model in self._models}
        kind = answers[0].content_type if answers else _TEXT
        pages = (labelled(answer.body, answer.model.names[0]) for answer in answers)
        page = await asyncio.to_thread(lambda: merge([*pages, up_page(up)]))  # of each model some 100 KB
        await send_body(send, 200, page, kind)

    async def _send_health(self, _scope: Scope, headers: Headers, send: Send) -> None:
        answers = await self._ask_all("/health", headers)
        status, body = _health_of_all(self._models, answers).response()
        await send_body(send, status, body)

    async def _send_state(self, scope: Scope, headers: Headers, send: Send) -> None:
        if any(name == b"accept" and b"text/event-stream" in value for name, value in headers):
            await self._send_stream(scope, headers, send)
        else:
            await send_body(send, 200, await self._state(scope, headers))

    async def _send_stream(self, scope: Scope, headers: Headers, send: Send) -> None:
        is_first = True

        async def document() -> bytes | None:
            """Return the next one; none if the stream's reader is refused meanwhile."""
            nonlocal is_first
            try:
                return await self._state(scope, headers)
            except _RefusedError:
                if is_first:
                    raise
                return None
            finally:
                is_first = False

        await self._streams.send(send, document)

    async def _state(self, scope: Scope, headers: Headers) -> bytes:
        """Return the document of all models. Raises _RefusedError."""
        answers = await self._answers(STATE_PATH, headers, query=scope["query_string"], may_be_none=True)
        states = {answer.model.label: msgspec.Raw(answer.body) for answer in answers}
        views = [{"name": each.label, "names": each.names, "state": states.get(each.label)} for each in self._models]
        return msgspec.json.encode({"models": views})

    async def _send_requests(self, scope: Scope, headers: Headers, send: Send) -> None:
        answers = await self._answers(REQUESTS_PATH, headers, query=scope["query_string"])
        lists = {answer.model.label: msgspec.json.decode(answer.body, type=_RequestList) for answer in answers}
        requests = [request for each in lists.values() for request in each.requests]
        requests.sort(key=lambda request: (request.get("stage") is not None, request["received_at"]), reverse=True)
        missing = [f"{label} {index}" for label, each in lists.items() for index in each.gateways_missing]
        await send_body(send, 200, msgspec.json.encode(_RequestList(requests[:_MAX_LISTED], missing)))

    async def _send_request(self, scope: Scope, headers: Headers, send: Send) -> None:
        answers = await self._ask_all(scope["raw_path"].decode("ascii"), headers)
        known = [answer for answer in answers if answer is not None]
        if not known:
            raise _no_model()
        await _pass_on(next((answer for answer in known if answer.status == 200), known[0]), send)

    async def _answers(
        self, path: str, headers: Headers, *, query: bytes = b"", may_be_none: bool = False
    ) -> Sequence[_Answer]:
        """Return the good answers. Raises _RefusedError with one by which the caller is refused, and, unless there
        `may_be_none`, with any other, or ModelUnavailable."""
        target = f"{path}?{query.decode('latin-1')}" if query else path
        answers = [answer for answer in await self._ask_all(target, headers) if answer is not None]
        good = [answer for answer in answers if answer.status == 200]
        for answer in answers:
            if 400 <= answer.status < 500 or not (good or may_be_none):
                raise _RefusedError(answer)
        if not (good or may_be_none):
            raise _no_model()
        return good

    async def _ask_all(self, target: str, headers: Headers) -> tuple[_Answer | None, ...]:
        """Return the answers in the order of the models; None of one that does not answer."""
        request = GatewayRequest(
            "GET", target.encode("latin-1"), [each for each in headers if each[0] not in _NOT_ASKED]
        )
        return await gather_or_cancel([self._ask(model, request) for model in self._models])

    async def _ask(self, model: Model, request: GatewayRequest) -> _Answer | None:
        body = bytearray()
        try:
            async with model.gateways.opened(request, total_s=_TIMEOUT_S) as response:
                async for piece in response.content.iter_any():
                    body += piece
                    if len(body) > _MAX_ANSWER_BYTES:
                        return None
                kind = response.headers.get("Content-Type", "application/json")
                return _Answer(model, response.status, bytes(body), kind.encode("latin-1"))
        except (aiohttp.ClientError, TimeoutError, MedialaneError) as error:
            logger.debug("%s does not answer: %r", model.label, error)
            return None


def _passing_refusals(handler: Handler) -> Handler:
    async def respond(scope: Scope, headers: Headers, send: Send) -> None:
        try:
            await handler(scope, headers, send)
        except _RefusedError as error:
            await _pass_on(error.answer, send)

    return respond


def _no_model() -> ModelUnavailable:
    return ModelUnavailable("no model serves yet")


def _health_of_all(models: ServedModels, answers: Sequence[_Answer | None]) -> Health:
    """Return `unavailable` if all are, and `degraded` if one of them is not well."""
    reports = [_health(answer) for answer in answers]
    problems = tuple(
        f"{model.label}: {problem}"
        for model, report in zip(models, reports, strict=True)
        for problem in (report.problems or ((report.status,) if report.status != "ok" else ()))
    )
    if all(report.status == "unavailable" for report in reports):
        return Health("unavailable", problems)
    return Health("degraded" if problems else "ok", problems)


def _health(answer: _Answer | None) -> Health:
    """Return what a gateway says of itself."""
    if answer is None:
        return Health("unavailable", ("starting, or its gateways do not run",))
    if not answer.body:
        return Health("ok" if answer.status == 200 else "unavailable")
    try:
        return msgspec.json.decode(answer.body, type=Health)
    except msgspec.DecodeError:
        return Health("unavailable", (f"/health has status {answer.status}",))


async def _pass_on(answer: _Answer, send: Send) -> None:
    await send_body(send, answer.status, answer.body, answer.content_type)


async def send_body(send: Send, status: int, body: bytes, content_type: bytes = b"application/json") -> None:
    await send_response(send, status, body, [(b"content-type", content_type), NO_STORE] if body else [])


def labelled(page: bytes, model: str) -> bytes:
    """Return a page in Prometheus's text format with the label in each series that does not have it."""
    pair = b'model_name="%b"' % _escaped(model)
    return b"\n".join(line if not line or line[:1] == b"#" else _with(line, pair) for line in page.split(b"\n"))


def _with(line: bytes, pair: bytes) -> bytes:
    if _HAS_LABEL.search(line):
        return line
    name, separator, rest = line.partition(b"{")
    if separator and b" " not in name:
        return name + b"{" + pair + (b"" if rest[:1] == b"}" else b",") + rest
    name, _, value = line.partition(b" ")
    return name + b"{" + pair + b"} " + value


def up_page(up: Mapping[str, bool]) -> bytes:
    """Return the page of the router's own series."""
    lines = [
        b"# HELP medialane_model_up Whether a gateway of the model answers.",
        b"# TYPE medialane_model_up gauge",
        *(b'medialane_model_up{model_name="%b"} %d' % (_escaped(name), is_up) for name, is_up in up.items()),
    ]
    return b"\n".join([*lines, b""])


def _escaped(value: str) -> bytes:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").encode()
