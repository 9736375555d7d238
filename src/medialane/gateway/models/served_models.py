"""The models behind the port: the names by which clients know them, and requests to their gateways, over unix sockets.

Theory of operation. aiohttp's client sends and receives, so that a request is streamed in both directions: it reads of
the body no more than the gateway takes, and of the response no more than the client takes. Connections are kept for
less time than gateways keep them (`http.server.ROUTER_KEEP_ALIVE_S`): a request on one that is being closed would be
lost, as it must not be repeated.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
import msgspec
from multidict import CIMultiDict
from yarl import URL

from medialane.types.errors import ModelUnavailable
from medialane.wire.listener import has_listener

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


class ModelGateways:
    """The gateways of one model: a request goes to the one that has the fewest."""

    def __init__(self, sockets: Sequence[str]) -> None:
        self._sockets = sockets
        self._in_flight = dict.fromkeys(sockets, 0)
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
        """Return whether any of them accepts connections."""
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


#: Names of adapters that are remembered for each model.
MAX_LEARNED = 4096


class ServedModel(msgspec.Struct, frozen=True):
    """What the router is told of a model: `label` is its table's name; `names` are from `--served-model-name`,
    `adapters` from `--lora-modules`, `sockets` the paths at which its gateways listen."""

    label: str
    names: tuple[str, ...]
    sockets: tuple[str, ...]
    adapters: tuple[str, ...] = ()


class Model:
    """One of them, with its gateways."""

    def __init__(self, served: ServedModel) -> None:
        self.label = served.label
        self.names = served.names
        self.adapters = served.adapters
        self.gateways = ModelGateways(served.sockets)


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
        return next((each for each in self.all if each.gateways.is_listening()), self.all[0])

    def learn(self, model: Model, names: Iterable[str]) -> None:
        """Remember what a model lists; a name that is already that of another one stays so."""
        self._learned = {name: each for name, each in self._learned.items() if each is not model}
        for name in list(names)[:MAX_LEARNED]:
            if (known := self.find(name)) is None:
                self._learned[name] = model
            elif known is not model and name not in self._ambiguous:
                self._ambiguous.add(name)
                logger.warning("%s has an adapter named %s, which requests get at %s", model.label, name, known.label)

    async def close(self) -> None:
        for each in self.all:
            await each.gateways.close()
