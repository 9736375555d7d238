"""The JSON API of the page, its event stream, the login, and the page's files
(docs/reference/state.md).

Theory of operation. A gateway that is asked makes its own part, and gets those of its siblings over their sockets. All
who watch at a gateway share one document a second: with nobody there, nothing is made. `access` has decided before who
may look.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import parse_qsl, quote

import msgspec

from medialane.gateway.gateway_metrics import AskOthers, no_others
from medialane.gateway.operators.part import Part
from medialane.gateway.operators.state import Limits, State
from medialane.gateway.requests import RecentRequests, RequestFilter, RequestView
from medialane.types.errors import InvalidKey, InvalidRequest, NotFound, Unavailable
from medialane.types.media import MODALITIES

if TYPE_CHECKING:  # types only: starlette is installed with vLLM
    from starlette.types import ASGIApp, Receive, Scope, Send

STATE_PATH = "/medialane/state"
STREAM_PATH = "/medialane/state/stream"
REQUESTS_PATH = "/medialane/requests"
REQUEST_PATH = "/medialane/requests/{id}"
LOGIN_PATH = "/medialane/login"
LOGOUT_PATH = "/medialane/logout"

#: Between two events of a stream, and at least between two documents.
INTERVAL_S = 1.0
#: Streams that are open at a gateway.
MAX_STREAMS = 32
#: Listed requests.
MAX_LIMIT = 1000
#: A wrong key is answered so much later.
_WRONG_KEY_S = 0.3

#: Longest body of a login.
MAX_LOGIN_BYTES = 8192


V = TypeVar("V")


class Login(msgspec.Struct):
    key: Annotated[str, msgspec.Meta(max_length=4096)]


class RequestList(msgspec.Struct):
    """Requests of one gateway, or of all; those that run are first."""

    requests: list[RequestView]
    gateways_missing: list[str] = []


class OperatorEndpoints:
    """`own_part` makes the part of this gateway, `state` the document of all parts. `begin_session` returns the
    cookie for a key, None for a wrong one, `end_session` what removes it. Streams end when `is_stopping`."""

    def __init__(
        self,
        index: str,
        recent: RecentRequests,
        *,
        own_part: Callable[[Limits], Awaitable[Part]],
        state: Callable[[Mapping[str, Part | None], Limits], Awaitable[State]],
        refresh: Callable[[], Awaitable[None]],
        begin_session: Callable[[str, Scope], str | None],
        end_session: Callable[[Scope], str],
        ask_others: AskOthers = no_others,
        is_stopping: Callable[[], bool] = bool,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._index = index
        self._recent = recent
        self._own_part = own_part
        self._state = state
        self._refresh = refresh
        self._begin_session = begin_session
        self._end_session = end_session
        self._ask_others = ask_others
        self._is_stopping = is_stopping
        self._interval_s = interval_s
        self._num_streams = 0
        self._documents: dict[Limits, tuple[float, bytes]] = {}
        self._making = asyncio.Lock()

    @property
    def routes(self) -> dict[str, ASGIApp]:
        """By method and path."""
        return {
            f"GET {STATE_PATH}": _Endpoint(self._send_state),
            f"GET {STREAM_PATH}": _Endpoint(self._send_stream),
            f"GET {REQUESTS_PATH}": _Endpoint(self._send_requests),
            f"GET {REQUEST_PATH}": _Endpoint(self._send_request),
            f"POST {LOGIN_PATH}": _Endpoint(self._log_in),
            f"POST {LOGOUT_PATH}": _Endpoint(self._log_out),
        }

    @property
    def answers(self) -> Mapping[str, Callable[[str], Awaitable[bytes]]]:
        """What other gateways ask by `AskOthers`."""
        return dict.fromkeys(("part", "requests", "request"), self._answer)

    async def _answer(self, path: str) -> bytes:
        """Raises MedialaneError."""
        what, _, query = path.partition("?")
        fields = _fields(query)
        if what == "part":
            return msgspec.json.encode(await self._own_part(_limits(fields)))
        if what == "requests":
            return msgspec.json.encode(RequestList(self._own_requests(*_wanted(fields))))
        record = self._recent.find(fields.get("id", ""))
        return b"null" if record is None else msgspec.json.encode(record.view(self._index, is_full=True))

    async def _send_state(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "text/event-stream" in _header(scope, b"accept"):
            return await self._send_stream(scope, receive, send)
        limits = _limits(_fields(scope["query_string"].decode("latin-1")))
        return await _send_json(send, await self._document(limits))

    async def _send_requests(self, scope: Scope, _receive: Receive, send: Send) -> None:
        query = scope["query_string"].decode("latin-1")
        wanted, limit = _wanted(_fields(query))
        listed, missing = self._own_requests(wanted, limit), []
        for index, answer in (await self._ask_others(f"requests?{query}")).items():
            if (theirs := _decoded(answer, RequestList)) is None:
                missing.append(index)
            else:
                listed += theirs.requests
        listed.sort(key=lambda view: (view.stage is not None, view.received_at), reverse=True)
        await _send_json(send, msgspec.json.encode(RequestList(listed[:limit], missing)))

    async def _send_request(self, scope: Scope, _receive: Receive, send: Send) -> None:
        request_id = scope["path_params"]["id"]
        path = f"request?id={quote(request_id, safe='')}"
        if (found := await self._answer(path)) == b"null":
            others = (await self._ask_others(path)).values()
            found = next((answer for answer in others if answer not in (None, b"null")), None) or b"null"
        if found == b"null":
            raise NotFound("no request with this id is kept", param="id")
        await _send_json(send, found)

    def _own_requests(self, wanted: RequestFilter, limit: int) -> list[RequestView]:
        newest = self._recent.newest(wanted)
        return [record.view(self._index) for record, _ in zip(newest, range(limit), strict=False)]

    async def _send_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits = _limits(_fields(scope["query_string"].decode("latin-1")))
        with self._open_stream():
            document = await self._document(limits)
            headers = [
                (b"content-type", b"text/event-stream"),
                (b"cache-control", b"no-store"),
                (b"x-accel-buffering", b"no"),
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await _send_piece(send, b"retry: 1000\n\n")
            async with _disconnect_of(receive) as disconnected:
                while not (disconnected.is_set() or self._is_stopping()):
                    await _send_piece(send, b"event: state\ndata: " + document + b"\n\n")
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._interval_s):
                            await disconnected.wait()
                    document = await self._document(limits)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _document(self, limits: Limits) -> bytes:
        """Return the state, at most `interval_s` old."""
        async with self._making:
            now = asyncio.get_running_loop().time()
            made_at, document = self._documents.get(limits, (float("-inf"), b""))
            if now - made_at < self._interval_s * 0.9:
                return document
            others, _ = await asyncio.gather(self._ask_others(f"part?{_query(limits)}"), self._refresh())
            parts: dict[str, Part | None] = {self._index: await self._own_part(limits)}
            parts |= {index: _decoded(answer, Part) for index, answer in others.items()}
            in_order = {index: parts[index] for index in sorted(parts, key=int)}
            await asyncio.sleep(0)
            document = msgspec.json.encode(await self._state(in_order, limits))
            self._documents = {
                known: made for known, made in self._documents.items() if now - made[0] < self._interval_s
            }
            self._documents[limits] = now, document
            return document

    async def _log_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            login = msgspec.json.decode(await _body(receive), type=Login)
        except msgspec.DecodeError as error:
            raise InvalidRequest('the body must be {"key": "..."}', param="key") from error
        cookie = self._begin_session(login.key, scope)
        if cookie is None:
            await asyncio.sleep(_WRONG_KEY_S)
            raise InvalidKey("this is not the admin key of this server", param="key")
        await _send_cookie(send, cookie)

    async def _log_out(self, scope: Scope, _receive: Receive, send: Send) -> None:
        await _send_cookie(send, self._end_session(scope))

    @contextmanager
    def _open_stream(self) -> Iterator[None]:
        if self._num_streams >= MAX_STREAMS:
            raise Unavailable(f"{MAX_STREAMS} streams of the state are open at this gateway", retry_after_s=5)
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1


class _Endpoint:
    """One of them as an ASGI app: Starlette takes a function for a handler of its own."""

    def __init__(self, respond: ASGIApp) -> None:
        self._respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._respond(scope, receive, send)


@asynccontextmanager
async def _disconnect_of(receive: Receive) -> AsyncIterator[asyncio.Event]:
    """Yield what is set when the client has gone."""
    disconnected = asyncio.Event()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        disconnected.set()

    watching = asyncio.create_task(watch(), name="stream-watch")
    try:
        yield disconnected
    finally:
        watching.cancel()
        await asyncio.wait([watching])


def _decoded(answer: bytes | None, kind: type[V]) -> V | None:
    """Return what another gateway has answered; None for nothing, and for what one of another version says."""
    try:
        return None if answer is None else msgspec.json.decode(answer, type=kind)
    except msgspec.DecodeError:
        return None


async def _body(receive: Receive) -> bytes:
    """Return the body, as far as a login has one."""
    body, more = b"", True
    while more and len(body) <= MAX_LOGIN_BYTES:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return body


async def _send_json(send: Send, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": 200, "headers": [*headers, _length(body)]})
    await send({"type": "http.response.body", "body": body})


async def _send_cookie(send: Send, cookie: str) -> None:
    headers = [(b"set-cookie", cookie.encode()), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


async def _send_piece(send: Send, piece: bytes) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": True})


def _length(body: bytes) -> tuple[bytes, bytes]:
    return b"content-length", str(len(body)).encode()


def _header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


def _fields(query: str) -> dict[str, str]:
    """Raises InvalidRequest."""
    try:
        return dict(parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=16))
    except ValueError as error:  # UnicodeDecodeError is one
        raise InvalidRequest("the query is not valid, or has too many parameters") from error


def _limits(fields: Mapping[str, str]) -> Limits:
    """Raises InvalidRequest."""
    _check_names(fields, Limits._fields)
    return Limits(**{name: _number(fields, name, least=0) for name in fields})


def _query(limits: Limits) -> str:
    return "&".join(f"{name}={value}" for name, value in limits._asdict().items())


def _wanted(fields: Mapping[str, str]) -> tuple[RequestFilter, int]:
    """Return which requests are wanted, and how many. Raises InvalidRequest."""
    texts = ("model", "tenant", "modality", "worker")
    _check_names(fields, (*texts, "slow", "failed", "live", "limit"))
    found: dict[str, Any] = {name: fields[name] for name in texts if name in fields}
    if fields.get("modality", "") not in ("", "text", *MODALITIES):
        raise InvalidRequest(f"modality must be one of {', '.join(MODALITIES)}, text", param="modality")
    if "slow" in fields:
        found["slow_ms"] = float(_number(fields, "slow", least=0))
    for name in ("failed", "live"):
        if name in fields:
            found[name] = _truth(fields, name)
    limit = _number(fields, "limit") if "limit" in fields else 100
    return RequestFilter(**found), min(limit, MAX_LIMIT)


def _check_names(fields: Mapping[str, str], allowed: tuple[str, ...]) -> None:
    for name in fields:
        if name not in allowed:
            raise InvalidRequest(f"unknown parameter; supported here: {', '.join(allowed)}", param=name[:64])


def _number(fields: Mapping[str, str], name: str, *, least: int = 1) -> int:
    text = fields[name]
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and int(text) >= least):
        raise InvalidRequest(f"{name} must be a whole number of at least {least}", param=name)
    return int(text)


def _truth(fields: Mapping[str, str], name: str) -> bool:
    if fields[name] not in ("true", "false"):
        raise InvalidRequest(f"{name} must be true or false", param=name)
    return fields[name] == "true"
