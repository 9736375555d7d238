"""Load generation for an OpenAI server, and the resources that the server's processes used."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp

from medialane.runtime.resources import cpu_seconds as cpu_seconds
from medialane.runtime.resources import descendants


@dataclass
class Answered:
    """One round of requests: time to first token of each, wall time, and the servers' CPU time."""

    ttft_s: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def requests_per_s(self) -> float:
        return len(self.ttft_s) / self.wall_s

    @property
    def cpu_ms_per_request(self) -> float:
        return 1000 * self.cpu_s / len(self.ttft_s)


def data_url(jpeg: bytes) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(jpeg).decode()


_JSON = {"content-type": "application/json"}


def image_request(model: str, url: str, text: str = "What is in the picture?") -> bytes:
    """Build a streaming chat completion of one token about one image."""
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return _request(model, content, num_tokens=1)


def text_request(model: str, text: str, *, num_tokens: int) -> bytes:
    """Build a streaming chat completion of exactly this many tokens."""
    return _request(model, text, num_tokens=num_tokens)


def _request(model: str, content: object, *, num_tokens: int) -> bytes:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    return json.dumps(body).encode()


async def send(
    base_url: str,
    bodies: Sequence[bytes],
    *,
    concurrency: int,
    pids: Callable[[], list[int]],
    session: aiohttp.ClientSession | None = None,
) -> Answered:
    """Send all bodies, `concurrency` at a time, and measure. Raises RuntimeError for an unexpected response.

    A `session` keeps its connections from one call to the next.
    """
    if session is None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=concurrency)) as own:
            return await send(base_url, bodies, concurrency=concurrency, pids=pids, session=own)
    answered = Answered()
    todo = iter(bodies)
    before = cpu_seconds(pids())
    started = time.perf_counter()

    async def client() -> None:
        for body in todo:
            sent = time.perf_counter()
            async with session.post(f"{base_url}/chat/completions", data=body, headers=_JSON) as response:
                first = await response.content.readline()
                answered.ttft_s.append(time.perf_counter() - sent)
                rest = await response.read()
                if response.status != 200 or b'"choices"' not in first or b"[DONE]" not in rest:
                    raise RuntimeError(f"{response.status}: {(first + rest)[:500]!r}")

    await asyncio.gather(*(client() for _ in range(concurrency)))
    answered.wall_s = time.perf_counter() - started
    answered.cpu_s = cpu_seconds(pids()) - before
    return answered


def process_tree(root: int) -> list[int]:
    """Return `root` and all its descendants."""
    return [root, *descendants(root)]
