"""The requests of an overload, drawn reproducibly, and clients that send them at given times, whatever becomes of
earlier ones."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, NamedTuple

import aiohttp

from harness import percentile
from load import data_url
from medialane.testing.sample_media import sample_jpeg
from medialane.testing.tiny_model import SENTENCES
from stream_reader import Stream

Kind = Literal["text", "known image", "new image"]
MIX: Mapping[Kind, float] = {"text": 0.4, "known image": 0.35, "new image": 0.25}
TEXT: Mapping[Kind, float] = {"text": 1.0}
MEDIA: Mapping[Kind, float] = {"known image": 0.5, "new image": 0.5}

#: Engine time of each at the simulated engines of `bench_overload`, s.
WORK_S: Mapping[Kind, float] = {"text": 0.25, "known image": 0.05, "new image": 0.1}

NUM_KNOWN = 8
#: So small that preparers have little to do.
_SIZE = (112, 84)
_NUM_SENTENCES = 8
_NUM_TOKENS = 4
#: What is without a first token so long after the last arrival is given up.
PATIENCE_S = 2.0
_REFUSED = frozenset((429, 503))
#: Start of a JPEG: the SOI marker, and a comment of nine characters, so that equal images have different bytes.
_HEAD = b"\xff\xd8\xff\xfe\x00\x0b%09d"


class Bodies:
    """Makes bodies. All texts differ in their first words; new images differ from all others."""

    def __init__(self, model: str, *, seed: int = 0) -> None:
        self._model = model
        self._random = random.Random(seed)
        self._jpeg = sample_jpeg(0, *_SIZE)[2:]
        self._numbers = count(NUM_KNOWN + 1)

    def draw(self, mix: Mapping[Kind, float]) -> Kind:
        (kind,) = self._random.choices(list(mix), list(mix.values()))
        return kind

    def make(self, kind: Kind) -> bytes:
        number = next(self._numbers)
        text = f"Question {number}: " + " ".join(self._random.choices(SENTENCES, k=_NUM_SENTENCES))
        content: list[dict[str, object]] = [{"type": "text", "text": text if kind == "text" else text[:40]}]
        if kind != "text":
            jpeg = _HEAD % (number if kind == "new image" else number % NUM_KNOWN) + self._jpeg
            content.insert(0, {"type": "image_url", "image_url": {"url": data_url(jpeg)}})
        body: dict[str, object] = {
            "model": self._model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": _NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        return json.dumps(body).encode()


@dataclass
class Answers:
    """The answers of the counted part of one load, `seconds` long."""

    seconds: float
    began_s: float = 0.0
    ended_s: float = 0.0
    streams: list[Stream] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)

    @property
    def refused(self) -> list[Stream]:
        return [stream for stream in self.streams if stream.status in _REFUSED]

    @property
    def failed(self) -> list[Stream]:
        """Answers with another error; clients that gave up have none."""
        return [stream for stream in self.streams if stream.error and stream.status not in _REFUSED]

    @property
    def ttfts_s(self) -> list[float]:
        """Of admitted requests; of one without a token, the time for which it has waited in vain."""
        admitted = [stream for stream in self.streams if stream.status not in _REFUSED and not stream.error]
        return [(stream.arrivals[0] if stream.arrivals else self.ended_s) - stream.began_s for stream in admitted]

    @property
    def last_refusal_s(self) -> float:
        """When the last request was sent that was refused, since the start of the load; 0 if none was."""
        return max([stream.began_s - self.began_s for stream in self.refused], default=0.0)

    @property
    def tokens_served(self) -> int:
        """The prompts' tokens of what was answered, of those with media twice, as gateways share them out."""
        pairs = zip(self.kinds, self.streams, strict=True)
        return sum(stream.num_prompt_tokens * (1 if kind == "text" else 2) for kind, stream in pairs if stream.arrivals)

    @property
    def work_s(self) -> float:
        """The seconds of engine time of what was answered."""
        return sum(WORK_S[kind] for kind, stream in zip(self.kinds, self.streams, strict=True) if stream.arrivals)

    def goodput(self, limit_s: float) -> float:
        """Return the requests per second whose first token came within the limit."""
        return len(self._good(limit_s)) / self.seconds

    def good_work(self, limit_s: float) -> float:
        """Return the seconds of engine time per second of those requests."""
        return sum(WORK_S[kind] for kind in self._good(limit_s)) / self.seconds

    def _good(self, limit_s: float) -> list[Kind]:
        pairs = zip(self.kinds, self.streams, strict=True)
        return [kind for kind, stream in pairs if stream.arrivals and stream.arrivals[0] - stream.began_s <= limit_s]

    def ttft_s(self, share: float) -> float:
        return percentile(self.ttfts_s, share) if self.ttfts_s else 0.0

    def refusal_s(self, share: float) -> float:
        """Return the gateway's time of a refusal."""
        times = [stream.gateway_s or stream.ended_s - stream.began_s for stream in self.refused]
        return percentile(times, share) if times else 0.0


@dataclass(frozen=True)
class Flow:
    """Requests of one client: what it asks, how many per second at a time since the start, with which key."""

    mix: Mapping[Kind, float]
    rate: Callable[[float], float]
    key: str = ""


class Capacity(NamedTuple):
    """What is served per second: requests, and tokens of their prompts."""

    requests: float
    tokens: float


def steadily(rate: float) -> Callable[[float], float]:
    return lambda _: rate


class Clients:
    def __init__(self, session: aiohttp.ClientSession, bodies: Bodies, *, seed: int = 0) -> None:
        self._session = session
        self._bodies = bodies
        self._random = random.Random(seed)
        self._numbers = count(1)

    async def send(self, urls: Sequence[str], flows: Sequence[Flow], *, warm_s: float, seconds: float) -> list[Answers]:
        """Send all flows for `warm_s + seconds`; return the answers to the requests of the latter, by flow."""
        return await asyncio.gather(*(self._send(urls, flow, warm_s, seconds) for flow in flows))

    async def closed_loop(self, url: str, *, number: int, warm_s: float, seconds: float) -> Capacity:
        """Measure so many clients that ask without a pause: what ends within `seconds` after `warm_s`, whenever it
        began. Raises RuntimeError for an error."""
        begins_s = time.perf_counter() + warm_s
        ends_s, num_done, num_tokens = begins_s + seconds, 0, 0

        async def client() -> None:
            nonlocal num_done, num_tokens
            while time.perf_counter() < ends_s:
                stream = Stream(next(self._numbers))
                await stream.read(self._session, url, self._bodies.make(self._bodies.draw(MIX)))
                if stream.error:
                    raise RuntimeError(f"{stream.status} {stream.error}")
                if begins_s <= stream.ended_s < ends_s:
                    num_done, num_tokens = num_done + 1, num_tokens + stream.num_prompt_tokens

        await asyncio.gather(*(client() for _ in range(number)))
        return Capacity(num_done / seconds, num_tokens / seconds)

    async def _send(self, urls: Sequence[str], flow: Flow, warm_s: float, seconds: float) -> Answers:
        answers, asked = Answers(seconds), list[asyncio.Task[None]]()
        answers.began_s = began_s = at = time.perf_counter()
        while True:
            at += self._random.expovariate(flow.rate(at - began_s))
            if at > began_s + warm_s + seconds:
                break
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            stream, kind = Stream(next(self._numbers)), self._bodies.draw(flow.mix)
            if at > began_s + warm_s:
                answers.streams.append(stream)
                answers.kinds.append(kind)
            headers = {"authorization": f"Bearer {flow.key}"} if flow.key else {}
            body = self._bodies.make(kind)
            asked.append(asyncio.create_task(stream.read(self._session, self._random.choice(urls), body, headers)))
        await asyncio.wait(asked, timeout=PATIENCE_S)
        answers.ended_s = time.perf_counter()
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        return answers
