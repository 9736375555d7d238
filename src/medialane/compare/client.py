"""Sends requests to one server and measures its replies. Nothing is parsed before a response has ended."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from medialane.check.client import get
from medialane.compare.asked import CHAT, Asking
from medialane.compare.events import read_document, read_stream
from medialane.compare.reply import Reply
from medialane.core.errors import StartupFailed
from medialane.core.http_failure import describe_failure

#: Of a line of a stream: many logprobs.
_LINE_BYTES: Final = 4 << 20
_EVENT: Final = b"data: "
#: Asks medialane for its report; other servers ignore it.
_REPORT: Final = {"X-Medialane-Report": "true"}
_TOKEN_IDS: Final = "return_token_ids"  # noqa: S105 - a member of vLLM's requests
_WARM_UP: Final = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 2}


class CompareClient:
    """A server, by its address without /v1. Use it in `async with opened(...)`."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str, asking: Asking) -> None:
        self._session = session
        self._base_url = base_url
        self.asking = asking

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
            yield cls(session, base_url, Asking(_served(models, base_url), as_sent, has_ids))

    async def warm_up(self) -> None:
        """Have the server answer something small, whatever it answers."""
        body = {**_WARM_UP, "model": self.asking.model}
        try:
            async with self._session.post(self._base_url + CHAT, json=body) as response:
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
