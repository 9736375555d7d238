"""Sends the requests of the check to one server and reads whole responses."""

from __future__ import annotations

import io
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from medialane.cluster import HttpAnswers
from medialane.tools.check.case import Answer, CaseRequest, Upload
from medialane.tools.http_failure import describe_failure
from medialane.types.errors import StartupFailed

_DONE = "[DONE]"
_DATA = "data: "
_CACHE = re.compile(r'cache;desc="(\w+)"')
_REPORT = {"report": True}


class CheckClient:
    """A server, by its address without /v1. Use it in a `async with opened(...)`."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str, *, model: str, wants_report: bool) -> None:
        self._session = session
        self._base_url = base_url
        self._model = model
        self._wants_report = wants_report

    @classmethod
    @asynccontextmanager
    async def opened(
        cls, base_url: str, *, api_key: str = "", wants_report: bool = False, timeout_s: float = 600
    ) -> AsyncIterator[CheckClient]:
        """Connect to a ready server and ask it for its model's name. `wants_report`: have medialane say how it has
        served each request. Raises StartupFailed."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        # A kept connection may be closed by the server just when the next request is sent.
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session:
            models = await get(session, f"{base_url}/v1/models")
            yield cls(session, base_url, model=models["data"][0]["id"], wants_report=wants_report)

    async def routes(self) -> frozenset[str]:
        """Return the paths of the app's endpoints. Raises StartupFailed."""
        return frozenset((await get(self._session, f"{self._base_url}/openapi.json"))["paths"])

    async def no_embeddings(self, metrics_key: str) -> str:
        """Return why medialane's worker keeps no embeddings, from the metrics; empty if it does. Raises
        StartupFailed."""
        kept = await self._samples("medialane_worker_keeps_embeddings", metrics_key)
        return next((sample.labels["reason"] for sample in kept if not sample.value), "")

    async def predicted(self, metrics_key: str) -> tuple[str, ...]:
        """Return the modalities for which medialane knows an item's tokens from the size of its media, from the
        metrics. Raises StartupFailed."""
        predicted = await self._samples("medialane_headers_predicted", metrics_key)
        return tuple(sorted(sample.labels["modality"] for sample in predicted if sample.value))

    async def _samples(self, name: str, metrics_key: str) -> list[Sample]:
        headers = {"Authorization": f"Bearer {metrics_key}"} if metrics_key else {}
        page = await get(self._session, f"{self._base_url}/metrics", headers=headers, read="text")
        families = text_string_to_metric_families(page)
        return [sample for family in families for sample in family.samples if sample.name == name]

    async def is_healthy(self) -> bool:
        return await HttpAnswers(f"{self._base_url}/health").passes()

    async def post(self, request: CaseRequest) -> Answer:
        """Send a request; an answer without a status if there is no whole response."""
        try:
            async with self._session.post(self._base_url + request.path, **self._content(request)) as response:
                raw = await response.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError) as error:
            return Answer(0, f"no response: {describe_failure(error)}")
        return _answer(response, raw)

    def _content(self, request: CaseRequest) -> dict[str, Any]:
        if request.body is None:
            form = aiohttp.FormData()
            if not any(name == "model" for name, _ in request.form):
                form.add_field("model", self._model)
            if self._wants_report:
                form.add_field("medialane", json.dumps(_REPORT))
            for name, value in request.form:
                if isinstance(value, Upload):
                    form.add_field(name, io.BytesIO(value.data), filename=value.name, content_type=value.media_type)
                else:
                    form.add_field(name, value)
            return {"data": form}
        body = {"model": self._model, **request.body}
        if self._wants_report:
            body["medialane"] = _REPORT
        headers = {"Content-Type": "application/json"}
        # As a file: aiohttp warns of large bodies otherwise.
        return {"data": io.BytesIO(json.dumps(body).encode()), "headers": headers}


async def get(
    session: aiohttp.ClientSession, url: str, *, headers: Mapping[str, str] | None = None, read: str = "json"
) -> Any:
    """Return a document of a server, or a page if `read` is "text". Raises StartupFailed."""
    try:
        async with session.get(url, headers=headers) as response:
            response.raise_for_status()
            return await (response.json() if read == "json" else response.text())
    except (aiohttp.ClientError, TimeoutError) as error:
        raise StartupFailed(f"{url} gave no answer: {describe_failure(error)}") from error


def _answer(response: aiohttp.ClientResponse, raw: str) -> Answer:
    if response.content_type == "text/event-stream":
        return _streamed(response.status, raw)
    try:
        document = json.loads(raw)
    except ValueError:
        return Answer(response.status, raw)
    report = document.pop("medialane", {}) if isinstance(document, dict) else {}
    return Answer(response.status, document, report=report or _timed(response))


def _timed(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """Return what Server-Timing says of a form, which cannot ask for a report."""
    cache = _CACHE.search(response.headers.get("Server-Timing", ""))
    return {"items": [{"cache": cache[1]}]} if cache and cache[1] != "none" else {}


def _streamed(status: int, raw: str) -> Answer:
    lines = [line.removeprefix(_DATA) for line in raw.split("\n") if line.startswith(_DATA)]
    if _DONE not in lines:
        return Answer(0, "the stream broke off")
    events = [json.loads(line) for line in lines if line != _DONE]
    reports = [event["medialane"] for event in events if "medialane" in event]
    kept = tuple(event for event in events if "medialane" not in event)
    return Answer(status, None, kept, reports[-1] if reports else {})
