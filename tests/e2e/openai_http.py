"""OpenAI requests as JSON, sent unchanged: bodies, their parts, and a client that exposes the whole response."""

import base64
import io
import json
import re
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from medialane.testing.sample_media import sample_jpeg
from video_clips import clip
from waiting import eventually

CHAT = "/v1/chat/completions"
MAX_TOKENS = 10
_TIMEOUT = aiohttp.ClientTimeout(total=180)

#: Fields that differ between servers for equal outputs: names, dates, cache hits.
_VOLATILE = frozenset(
    (
        "id",
        "created",
        "created_at",
        "completed_at",
        "system_fingerprint",
        "prompt_tokens_details",
        "input_tokens_details",
        "request_id",
    )
)


@cache
def photo(seed: int, width: int = 512, height: int = 384) -> bytes:
    return sample_jpeg(seed, width, height)


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def data_url(data: bytes, media_type: str = "image/jpeg") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def picture(seed: int, width: int = 512, height: int = 384) -> dict[str, Any]:
    """The photo of `seed` as a part of a message."""
    return image(data_url(photo(seed, width, height)))


def video(seed: int, **options: Any) -> dict[str, Any]:
    """A clip of three seconds as a part of a message, with the part's own options."""
    data = clip(75, size=(160 + 8 * (seed % 4), 120), b_frames=seed % 3)
    return {"type": "video_url", "video_url": {"url": data_url(data, "video/mp4"), **options}}


def chat(*content: dict[str, Any], **options: Any) -> dict[str, Any]:
    """A greedy chat completion that shows its token ids."""
    return {
        "messages": [{"role": "user", "content": list(content)}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "return_token_ids": True,
        **options,
    }


def long_chat(*content: dict[str, Any], **options: Any) -> dict[str, Any]:
    """A chat completion that takes the engine tens of seconds: for tests that do not wait for its end."""
    return chat(*content, **{"max_tokens": 7000, "n": 4, "temperature": 1, "seed": 1, "ignore_eos": True, **options})


@dataclass(frozen=True)
class Answer:
    """A whole HTTP response. `events` are a stream's, without `[DONE]`."""

    status: int
    json: Any
    headers: dict[str, str]
    events: list[Any]

    @property
    def ids(self) -> list[int]:
        """The token ids of the first choice."""
        choices = [event["choices"] for event in self.events] or [self.json["choices"]]
        return [token for found in choices for choice in found[:1] for token in choice.get("token_ids") or ()]

    @property
    def content(self) -> str:
        if not self.events:
            return self.json["choices"][0]["message"]["content"]
        deltas = [choice["delta"] for event in self.events for choice in event["choices"][:1]]
        return "".join(delta.get("content") or "" for delta in deltas)

    @property
    def error(self) -> dict[str, Any]:
        """The error in OpenAI's format, of a response or at the end of a stream, where only a report may follow."""
        found = next((event for event in self.events[-2:] if "error" in event), self.json)
        assert set(found["error"]) >= {"message", "type", "param", "code"}, found
        return found["error"]

    @property
    def cache(self) -> str:
        return re.search(r'cache;desc="(\w+)"', self.headers["server-timing"])[1]

    @property
    def copied_bytes(self) -> int:
        return int(re.search(r'copied;desc="(\d+)"', self.headers["server-timing"])[1])

    @property
    def steps(self) -> dict[str, float]:
        """Milliseconds by step."""
        return {k: float(v) for k, v in re.findall(r"(\w+);dur=([\d.]+)", self.headers["server-timing"])}


class BrokenOff(AssertionError):
    """A stream ended without its last event."""


class OpenAiHttp:
    """A server by its address without /v1, and the model that its requests name."""

    def __init__(self, base_url: str, model: str, *, api_key: str = "", trust: ssl.SSLContext | bool = True) -> None:
        self._trust = trust
        self.base_url = base_url
        self.model = model
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def post(self, body: Any, path: str = CHAT, headers: dict[str, str] | None = None) -> Answer:
        """Send `body` and read the whole response. The model is filled in, bytes are sent as such."""
        async with self.opened(body, path, headers) as response:
            raw = await response.text()
            headers = {name.lower(): value for name, value in response.headers.items()}
            if response.content_type == "text/event-stream":
                return Answer(response.status, None, headers, list(map(json.loads, _events(raw))))
            is_json = response.content_type == "application/json" and raw
            return Answer(response.status, json.loads(raw) if is_json else raw, headers, [])

    def session(self, **headers: str) -> aiohttp.ClientSession:
        """A session of its own, and so a connection of its own."""
        connector = aiohttp.TCPConnector(ssl=self._trust)
        return aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT, headers={**self._headers, **headers})

    async def get(self, path: str) -> Answer:
        async with (
            self.session() as session,
            session.get(self.base_url + path) as response,
        ):
            return Answer(response.status, await response.json(), dict(response.headers), [])

    async def succeed(self, body: Any, path: str = CHAT) -> Answer:
        """`post`, and assert that the response is successful."""
        answer = await self.post(body, path)
        assert answer.status == 200, answer.json
        assert not any("error" in event for event in answer.events), answer.events
        return answer

    @asynccontextmanager
    async def opened(
        self, body: Any, path: str = CHAT, headers: dict[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Stream the response. Leaving early disconnects."""
        data = body if isinstance(body, bytes) else json.dumps({"model": self.model, **body}).encode()
        async with (
            self.session(**{"Content-Type": "application/json", **(headers or {})}) as session,
            session.post(self.base_url + path, data=io.BytesIO(data)) as response,
        ):
            yield response

    async def metrics(self) -> "MetricsPage":
        async with (
            self.session() as session,
            session.get(self.base_url + "/metrics") as response,
        ):
            return MetricsPage(await response.text())

    async def by_gateway(self, name: str) -> dict[str, float]:
        """The samples of a family, summed for each of two gateways."""
        page = await self.metrics()
        return {gateway: page.value(name, gateway=gateway) for gateway in ("0", "1")}


async def both_gateways_answer(client: OpenAiHttp) -> None:
    before = await client.by_gateway("medialane_request_seconds_count")

    async def counted() -> bool:
        await client.succeed(chat(picture(2), max_tokens=1))
        after = await client.by_gateway("medialane_request_seconds_count")
        return all(after[i] > before[i] for i in after)

    await eventually(counted, "both have answered", 60)


class MetricsPage:
    """One scrape of /metrics."""

    def __init__(self, page: str) -> None:
        self.text = page
        self.samples = [s for family in text_string_to_metric_families(page) for s in family.samples]

    def twice(self) -> list[object]:
        """The families that have two types, and the series that occur twice: there should be none."""
        types = [line.split()[2] for line in self.text.splitlines() if line.startswith("# TYPE ")]
        series = [(sample.name, *sorted(sample.labels.items())) for sample in self.samples]
        return [found for counts in (Counter(types), Counter(series)) for found, number in counts.items() if number > 1]

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples that have these labels; 0 if there are none."""
        return sum(s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items())

    def by(self, name: str, label: str) -> dict[str, float]:
        return {s.labels[label]: s.value for s in self.samples if s.name == name}


async def stream_events(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    """The events of a stream as they come, without `[DONE]`."""
    async for line in response.content:
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))


def _events(raw: str) -> list[str]:
    found = [line.removeprefix("data: ") for line in raw.split("\n") if line.startswith("data: ")]
    if found[-1:] != ["[DONE]"]:
        raise BrokenOff(f"the stream broke off: {found[-2:]}")
    return found[:-1]


def assert_same(ours: Any, plain: Any, at: str = "answer") -> None:
    """Two JSON values are equal except for volatile fields and rounding."""
    assert type(ours) is type(plain), f"{at}: {ours!r} instead of {plain!r}"
    if isinstance(ours, dict):
        kept = [{k: v for k, v in found.items() if k not in _VOLATILE} for found in (ours, plain)]
        assert kept[0].keys() == kept[1].keys(), f"{at}: {ours} instead of {plain}"
        for key in kept[0]:
            assert_same(kept[0][key], kept[1][key], f"{at}.{key}")
    elif isinstance(ours, list):
        assert len(ours) == len(plain), f"{at}: {ours} instead of {plain}"
        for number, (one, other) in enumerate(zip(ours, plain, strict=True)):
            assert_same(one, other, f"{at}[{number}]")
    elif isinstance(ours, float):
        assert ours == pytest.approx(plain, abs=0.05), at
    else:
        assert ours == plain, f"{at}: {ours!r} instead of {plain!r}"


async def load(ours: OpenAiHttp) -> dict[str, float]:
    """Requests in flight by worker address."""
    return (await ours.metrics()).by("medialane_worker_in_flight", "worker")


async def num_begun(ours: OpenAiHttp) -> float:
    """Media items of requests that have had a token: one per request here."""
    return (await ours.metrics()).value("medialane_media_items_total")


async def in_flight(ours: OpenAiHttp, number: int) -> bool:
    return sum((await load(ours)).values()) == number
