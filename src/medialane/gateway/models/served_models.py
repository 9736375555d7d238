"""The models behind the port: the names by which clients know them, requests to their gateways, over unix sockets, and
what is answered for all of them.

Theory of operation. aiohttp's client sends and receives, so that a request is streamed in both directions: it reads of
the body no more than the gateway takes, and of the response no more than the client takes. Connections are kept for
less time than gateways keep them (`http.server.ROUTER_KEEP_ALIVE_S`): a request on one that is being closed would be
lost, as it must not be repeated.

For an answer of all models, each is asked with the caller's own headers, and their answers are put together. Whom a
model refuses gets its refusal: all of them have the same keys. A model that does not answer is left out; if none does,
the answer is 503. On the page of metrics, every series has vLLM's label `model_name`.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import aiohttp
import msgspec
from multidict import CIMultiDict
from yarl import URL

from medialane.gateway.http.access import STATE_PATH
from medialane.gateway.http.metrics import METRICS_PATH, merge
from medialane.gateway.http.responses import NO_STORE, send_response
from medialane.gateway.workers.pool import Health
from medialane.runtime.tasks import gather_or_cancel
from medialane.types.errors import MedialaneError, ModelUnavailable
from medialane.wire.listener import has_listener

if TYPE_CHECKING:  # types only: starlette is installed with vLLM
    from starlette.types import Send

logger = logging.getLogger(__name__)

#: Of one connection, and not of the request or response (RFC 9110, section 7.6.1); `expect` is answered hop by hop.
HOP_BY_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization", b"te",
    b"trailer", b"transfer-encoding", b"upgrade", b"expect",
})  # fmt: skip
_OF_AIOHTTP = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
#: Longest time for a gateway to accept a connection: it does so when its event loop is free.
_CONNECT_S = 30.0
#: How long an idle connection is kept.
KEEP_ALIVE_S = 15.0
#: Most bytes of a response that are read ahead of the client.
_READ_AHEAD_BYTES = 1 << 18

Headers = Sequence[tuple[bytes, bytes]]


class GatewayRequest(NamedTuple):
    """What is sent: `target` is path and query, `headers` are not changed; `body` is None if there is none."""

    method: str
    target: bytes
    headers: Headers
    body: AsyncIterator[bytes] | None = None
    expects_continue: bool = False


#: Names of adapters that are remembered for each model.
MAX_LEARNED = 4096


class ServedModel(msgspec.Struct, frozen=True):
    """What the name router knows of a model: `label` is its table's name; `names` are from `--served-model-name`,
    `adapters` from `--lora-modules`, `sockets` the paths at which its gateways listen."""

    label: str
    names: tuple[str, ...]
    sockets: tuple[str, ...]
    adapters: tuple[str, ...] = ()


class Model:
    """One model and its gateways: a request goes to the one that has the fewest."""

    def __init__(self, served: ServedModel) -> None:
        self.label = served.label
        self.names = served.names
        self.adapters = served.adapters
        self._sockets = served.sockets
        self._in_flight = dict.fromkeys(served.sockets, 0)
        self._sessions: dict[str, aiohttp.ClientSession] = {}

    @asynccontextmanager
    async def opened(
        self, request: GatewayRequest, *, total_s: float | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request; yield the response, whose body has not been read. Raises ModelUnavailable if no gateway
        accepts a connection, aiohttp.ClientError if one fails later, TimeoutError after `total_s`."""
        for path in sorted(self._sockets, key=self._in_flight.__getitem__):
            self._in_flight[path] += 1
            try:
                async with self._sent(path, request, total_s) as response:
                    yield response
                    return
            except aiohttp.ClientConnectorError as error:
                logger.debug("a gateway does not listen: %s", error)
            finally:
                self._in_flight[path] -= 1
        raise ModelUnavailable("the model is starting, or its gateways do not run")

    def _sent(self, path: str, request: GatewayRequest, total_s: float | None) -> Any:
        return self._session(path).request(
            request.method,
            URL("http://gateway" + request.target.decode("ascii"), encoded=True),  # the server parses no other bytes
            headers=_as_text(request.headers),
            data=request.body,
            skip_auto_headers=_OF_AIOHTTP,
            allow_redirects=False,
            expect100=request.expects_continue,
            timeout=aiohttp.ClientTimeout(total=total_s, sock_connect=_CONNECT_S),
            read_bufsize=_READ_AHEAD_BYTES,
        )

    def _session(self, path: str) -> aiohttp.ClientSession:
        if path not in self._sessions:
            self._sessions[path] = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(path, keepalive_timeout=KEEP_ALIVE_S, limit=0),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                max_line_size=1 << 16,
                max_field_size=1 << 16,
            )
        return self._sessions[path]

    def is_listening(self) -> bool:
        """Return whether any of its gateways accepts connections."""
        return any(map(has_listener, self._sockets))

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()


def end_to_end(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Return the headers without hop-by-hop ones, which `Connection` may name."""
    named = {
        word.strip().lower() for name, value in headers if name.lower() == b"connection" for word in value.split(b",")
    }
    return [(name, value) for name, value in headers if name.lower() not in HOP_BY_HOP | named]


def _as_text(headers: Headers) -> CIMultiDict[str]:
    return CIMultiDict((name.decode("latin-1"), _text(value)) for name, value in headers)


def _text(value: bytes) -> str:
    """aiohttp sends UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


class ServedModels:
    """All of them, in the order of the file, by the names of models and adapters. Adapters that are loaded at run time
    are learned from the models' lists."""

    def __init__(self, served: Sequence[ServedModel]) -> None:
        self.all = [Model(each) for each in served]
        self._fixed = {name: each for each in self.all for name in (*each.names, *each.adapters)}
        self._learned: dict[str, Model] = {}
        #: Names of several models, which were reported.
        self._ambiguous: set[str] = set()

    def __iter__(self) -> Iterator[Model]:
        return iter(self.all)

    @property
    def names(self) -> list[str]:
        """The names of the models themselves."""
        return [name for each in self.all for name in each.names]

    def find(self, name: str | None) -> Model | None:
        return None if name is None else self._fixed.get(name) or self._learned.get(name)

    def any_serving(self) -> Model:
        """Return the first model whose gateways listen; if none do, the first."""
        return next((each for each in self.all if each.is_listening()), self.all[0])

    def learn(self, model: Model, names: Iterable[str]) -> None:
        """Remember what a model lists; a name that another model already has stays that model's."""
        self._learned = {name: each for name, each in self._learned.items() if each is not model}
        for name in list(names)[:MAX_LEARNED]:
            if (known := self.find(name)) is None:
                self._learned[name] = model
            elif known is not model and name not in self._ambiguous:
                self._ambiguous.add(name)
                logger.warning("%s has an adapter named %s, which requests get at %s", model.label, name, known.label)

    async def close(self) -> None:
        for each in self.all:
            await each.close()


MODELS_PATH = "/v1/models"
_HEALTH_PATHS = frozenset({"/health", "/ping"})
#: Longer than a gateway waits for its workers when it is scraped.
_TIMEOUT_S = 5.0
_MAX_ANSWER_BYTES = 64 << 20
#: Not of the question that the models are asked: its caller's body; what is put together is plain text, and complete.
_NOT_ASKED = frozenset({b"content-length", b"content-type", b"accept", b"accept-encoding", b"if-none-match"})
_TEXT = b"text/plain; version=0.0.4; charset=utf-8"
_HAS_LABEL = re.compile(rb'[{,]model_name="')

Handler = Callable[[Headers, "Send"], Awaitable[None]]


class _Answer(NamedTuple):
    model: Model
    status: int
    body: bytes
    content_type: bytes = b"application/json"


class RefusedByModel(Exception):
    """A model's answer is to be the answer for all models."""

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
            return self._send_health
        if method != "GET":
            return None
        if path.startswith(METRICS_PATH):
            return self._send_metrics
        return {MODELS_PATH: self._send_models, STATE_PATH: self._send_state}.get(path)

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
        """Return the good answers. Raises RefusedByModel with one by which the caller is refused, and, unless there
        `may_be_none`, with any other, or ModelUnavailable."""
        answers = [answer for answer in await self._ask_all(path, headers) if answer is not None]
        good = [answer for answer in answers if answer.status == 200]
        for answer in answers:
            if 400 <= answer.status < 500 or not (good or may_be_none):
                raise RefusedByModel(answer)
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
            async with model.opened(request, total_s=_TIMEOUT_S) as response:
                async for piece in response.content.iter_any():
                    body += piece
                    if len(body) > _MAX_ANSWER_BYTES:
                        return None
                kind = response.headers.get("Content-Type", "application/json")
                return _Answer(model, response.status, bytes(body), kind.encode("latin-1"))
        except (aiohttp.ClientError, TimeoutError, MedialaneError) as error:
            logger.debug("%s does not answer: %r", model.label, error)
            return None


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
    """Return the page of the name router's own series."""
    lines = [
        b"# HELP medialane_model_up Whether a gateway of the model answers.",
        b"# TYPE medialane_model_up gauge",
        *(b'medialane_model_up{model_name="%b"} %d' % (_escaped(name), is_up) for name, is_up in up.items()),
    ]
    return b"\n".join([*lines, b""])


def _escaped(value: str) -> bytes:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").encode()
