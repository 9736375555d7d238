"""Sends requests to one server and measures its replies: to its model, streamed where they can be, and greedy. Nothing
is parsed before a response has ended."""

from __future__ import annotations

import io
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from pybase64 import b64decode

from medialane.tools.check.client import get
from medialane.tools.compare.reply import TYPED, Reply, read_document, read_stream
from medialane.tools.compare.traffic import Ask, UnusableLine
from medialane.tools.http_failure import describe_failure
from medialane.types.errors import StartupFailed

#: Of a line of a stream: many logprobs.
_LINE_BYTES: Final = 4 << 20
_EVENT: Final = b"data: "
#: Asks medialane for its report; other servers ignore it.
_REPORT: Final = {"X-Medialane-Report": "true"}
_TOKEN_IDS: Final = "return_token_ids"  # noqa: S105 - a member of vLLM's requests
_WARM_UP: Final = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 2}
_CHAT: Final = "/v1/chat/completions"
#: Endpoints with choices, of which vLLM returns token ids.
_WITH_CHOICES: Final = frozenset((_CHAT, "/v1/completions"))
_FILE: Final = "file_url"
#: Members that sampling needs, and that a greedy request may not have, or not with any value.
_OF_SAMPLING: Final = frozenset(("top_p", "top_k", "min_p", "seed", "best_of"))


class CompareClient:
    """A server, by its address without /v1. Use it in `async with opened(...)`.

    `model` is the name of the served one. `as_sent`: requests are sampled and streamed as they are, so that answers
    need not be equal. `has_token_ids`: the server returns token ids if it is asked for them."""

    def __init__(
        self, session: aiohttp.ClientSession, base_url: str, *, model: str, as_sent: bool, has_token_ids: bool
    ) -> None:
        self._session = session
        self._base_url = base_url
        self._model = model
        self._as_sent = as_sent
        self._has_token_ids = has_token_ids

    @classmethod
    @asynccontextmanager
    async def opened(
        cls, base_url: str, *, api_key: str = "", as_sent: bool = False, timeout_s: float = 600
    ) -> AsyncIterator[CompareClient]:
        """Connect to a ready server, and ask it for its model's name. Raises StartupFailed."""
        headers = _REPORT | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            read_bufsize=_LINE_BYTES,
        ) as session:
            models = await get(session, f"{base_url}/v1/models")
            has_ids = _TOKEN_IDS in await _get_if_any(session, f"{base_url}/openapi.json", default=_TOKEN_IDS)
            model = _served(models, base_url)
            yield cls(session, base_url, model=model, as_sent=as_sent, has_token_ids=has_ids)

    async def warm_up(self) -> None:
        """Have the server answer something small, whatever it answers."""
        body = {**_WARM_UP, "model": self._model}
        try:
            async with self._session.post(self._base_url + _CHAT, json=body) as response:
                await response.read()
        except (aiohttp.ClientError, TimeoutError):
            return  # the first request says what is wrong

    async def counters(self, names: Mapping[str, str], metrics_key: str) -> dict[str, float]:
        """Return the sums of these metrics of the server by our names for them; those that it has."""
        headers = {"Authorization": f"Bearer {metrics_key}"} if metrics_key else {}
        page = await _get_if_any(self._session, f"{self._base_url}/metrics", default="", headers=headers)
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name in names:
                    found[names[sample.name]] = found.get(names[sample.name], 0.0) + sample.value
        return found

    def content(self, ask: Ask) -> dict[str, Any]:
        """Return the arguments of aiohttp's request. May take long for large media: not for the event loop. Raises
        UnusableLine."""
        body = self._body(ask)
        if _FILE in body:
            return {"data": _form(body)}
        return {"data": msgspec.json.encode(body), "headers": {"Content-Type": "application/json"}}

    def _body(self, ask: Ask) -> dict[str, Any]:
        body = {**ask.body, "model": self._model}
        body.pop("medialane", None)
        if self._as_sent or ask.path not in _WITH_CHOICES | TYPED:
            return body
        body = {name: value for name, value in body.items() if name not in _OF_SAMPLING}
        body |= {"temperature": 0, "stream": True}
        if body.get("n", 1) != 1:
            body["n"] = 1
        if ask.path in _WITH_CHOICES:
            body["stream_options"] = {"include_usage": True}
            if self._has_token_ids:
                body[_TOKEN_IDS] = True
        return body

    async def ask(self, path: str, content: Mapping[str, Any], number: int, *, began: float) -> Reply:
        """Send a request; a reply without a status if there is no whole response. `began` is the turn's start."""
        sent = time.perf_counter()
        try:
            async with self._session.post(self._base_url + path, **content) as response:
                if response.content_type == "text/event-stream":
                    lines = [
                        (time.perf_counter() - sent, line[len(_EVENT) :].strip())
                        async for line in response.content
                        if line.startswith(_EVENT)
                    ]
                    fields = read_stream(path, lines)
                else:
                    fields = read_document(await response.read())
                status = response.status
        except (aiohttp.ClientError, TimeoutError) as error:
            status, fields = 0, {"error": f"no response: {describe_failure(error)}"}
        except ValueError as error:  # a line or a document that is no JSON
            status, fields = 0, {"error": f"the response cannot be read: {error}"}
        if fields.pop("is_broken_off", False):
            status, fields = 0, {**fields, "error": fields.get("error") or "the stream broke off"}
        return Reply(number, status, sent - began, time.perf_counter() - sent, **fields)


def _form(body: Mapping[str, Any]) -> aiohttp.FormData:
    form = aiohttp.FormData()
    for name, value in body.items():
        if name == _FILE:
            form.add_field("file", io.BytesIO(_file(value)), filename="audio", content_type="application/octet-stream")
            continue
        for each in value if isinstance(value, list) else [value]:
            form.add_field(name, each if isinstance(each, str) else msgspec.json.encode(each).decode())
    return form


def _file(url: object) -> bytes:
    scheme, _, data = url.partition(";base64,") if isinstance(url, str) else ("", "", "")
    try:
        if scheme.startswith("data:"):
            return b64decode(data, validate=True)
    except ValueError as error:
        raise UnusableLine(f"{_FILE} is not base64: {error}") from error
    raise UnusableLine(f"{_FILE} is not a data: URL with base64: files are not fetched")


def _served(models: Any, base_url: str) -> str:
    try:
        return str(models["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise StartupFailed(f"{base_url}/v1/models names no model") from None


async def _get_if_any(
    session: aiohttp.ClientSession, url: str, *, default: str, headers: Mapping[str, str] | None = None
) -> str:
    """Return a page; `default` if the server has none."""
    try:
        async with session.get(url, headers=headers) as response:
            return await response.text() if response.status == 200 else default
    except (aiohttp.ClientError, TimeoutError):
        return default
