"""What is answered for all models: each is asked with the caller's own headers, and their answers are put together.

Whom a model refuses gets its refusal: all of them have the same keys. A model that does not answer is left out; if none
does, the answer is 503. On the page of metrics, every series has vLLM's label `model_name`.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import aiohttp
import msgspec

from medialane.gateway.http.access import STATE_PATH
from medialane.gateway.http.asgi import NO_STORE, send_response
from medialane.gateway.http.health import Health
from medialane.gateway.http.metrics import METRICS_PATH, merge
from medialane.gateway.http.middleware import Send
from medialane.gateway.models.served_models import GatewayRequest, Headers, Model, ServedModels
from medialane.runtime.tasks import gather_or_cancel
from medialane.types.errors import MedialaneError, ModelUnavailable

logger = logging.getLogger(__name__)

MODELS_PATH = "/v1/models"
_HEALTH_PATHS = frozenset({"/health", "/ping"})
#: Longer than a gateway waits for its workers when it is scraped.
_TIMEOUT_S = 5.0
_MAX_ANSWER_BYTES = 64 << 20
#: Not of the question that the models are asked: its caller's body; what is put together is plain text, and complete.
_NOT_ASKED = frozenset({b"content-length", b"content-type", b"accept", b"accept-encoding", b"if-none-match"})
_TEXT = b"text/plain; version=0.0.4; charset=utf-8"
_HAS_LABEL = re.compile(rb'[{,]model_name="')

Handler = Callable[[Headers, Send], Awaitable[None]]


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


class OfAllModels:
    def __init__(self, models: ServedModels) -> None:
        self._models = models

    def handler(self, method: str, path: str) -> Handler | None:
        """Return what answers a request that names no model; None if that must name one."""
        if path in _HEALTH_PATHS:
            found: Handler | None = self._send_health
        elif method != "GET":
            found = None
        elif path.startswith(METRICS_PATH):
            found = self._send_metrics
        else:
            found = {MODELS_PATH: self._send_models, STATE_PATH: self._send_state}.get(path)
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

    async def _send_models(self, headers: Headers, send: Send) -> None:
        cards = [card for answer in await self._answers(MODELS_PATH, headers) for card in self._learn(answer)]
        await send_body(send, 200, msgspec.json.encode(_ModelList(data=cards)))

    async def _send_metrics(self, headers: Headers, send: Send) -> None:
        answers = await self._answers(METRICS_PATH, headers, may_be_none=True)
        up = {model.names[0]: any(answer.model is model for answer in answers) for model in self._models}
        kind = answers[0].content_type if answers else _TEXT
        pages = (labelled(answer.body, answer.model.names[0]) for answer in answers)
        page = await asyncio.to_thread(lambda: merge([*pages, up_page(up)]))  # of each model some 100 KB
        await send_body(send, 200, page, kind)

    async def _send_health(self, headers: Headers, send: Send) -> None:
        answers = await self._ask_all("/health", headers)
        status, body = _health_of_all(self._models, answers).response()
        await send_body(send, status, body)

    async def _send_state(self, headers: Headers, send: Send) -> None:
        answers = await self._answers(STATE_PATH, headers, may_be_none=True)
        states = {answer.model.label: msgspec.Raw(answer.body) for answer in answers}
        views = [{"name": each.label, "names": each.names, "state": states.get(each.label)} for each in self._models]
        await send_body(send, 200, msgspec.json.encode({"models": views}))

    async def _answers(self, path: str, headers: Headers, *, may_be_none: bool = False) -> Sequence[_Answer]:
        """Return the good answers. Raises _RefusedError with one by which the caller is refused, and, unless there
        `may_be_none`, with any other, or ModelUnavailable."""
        answers = [answer for answer in await self._ask_all(path, headers) if answer is not None]
        good = [answer for answer in answers if answer.status == 200]
        for answer in answers:
            if 400 <= answer.status < 500 or not (good or may_be_none):
                raise _RefusedError(answer)
        if not (good or may_be_none):
            raise ModelUnavailable("no model serves yet")
        return good

    async def _ask_all(self, path: str, headers: Headers) -> tuple[_Answer | None, ...]:
        """Return the answers in the order of the models; None of one that does not answer."""
        request = GatewayRequest("GET", path.encode("latin-1"), [each for each in headers if each[0] not in _NOT_ASKED])
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
    async def respond(headers: Headers, send: Send) -> None:
        try:
            await handler(headers, send)
        except _RefusedError as error:
            answer = error.answer
            await send_body(send, answer.status, answer.body, answer.content_type)

    return respond


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
