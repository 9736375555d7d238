"""Load generation for an OpenAI server, and the resources that the server's processes used."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple

import aiohttp
import msgspec

from medialane.runtime.resources import cpu_seconds as cpu_seconds
from medialane.runtime.resources import descendants
from medialane.testing.tiny_model import SENTENCES


class Read(NamedTuple):
    """Events of a stream that the client has read together: they arrived in one burst."""

    at_s: float
    num_events: int


@dataclass
class Answered:
    """One round of requests: time to first token of each, times between tokens (`shared_gaps`), wall time, and the
    servers' CPU time."""

    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
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


_WORDS = " ".join(SENTENCES).split()


def random_text(seed: int, num_words: int) -> str:
    """Return a text that differs from those of other seeds from its first word on."""
    return f"{seed}: {' '.join(random.Random(seed).choices(_WORDS, k=num_words))}"


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
                last, reads = await read_stream(response)
                if response.status != 200 or b'"finish_reason":"' not in last:
                    raise RuntimeError(f"{response.status}: {last[:500]!r}")
                answered.ttft_s.append(reads[0].at_s - sent)
                answered.gaps_s += shared_gaps(reads)

    await asyncio.gather(*(client() for _ in range(concurrency)))
    answered.wall_s = time.perf_counter() - started
    answered.cpu_s = cpu_seconds(pids()) - before
    return answered


class _Measured(msgspec.Struct):
    """The fields that are used of what `vllm-rs bench serve` saves."""

    duration: float
    failed: int
    errors: list[str]
    ttfts: list[float]
    itls: list[list[float]]


#: For all requests of one call.
RUST_LOAD_S = 1800


def send_by_rust(
    program: Path,
    base_url: str,
    texts: Sequence[str],
    *,
    model: str,
    num_tokens: int,
    concurrency: int,
    pids: Callable[[], list[int]],
) -> Answered:
    """Send `text_request`s, and measure, as `send` does, by `vllm-rs bench serve`, which takes less CPU time from the
    servers. Not for the event loop. Raises RuntimeError if it or a request fails, subprocess.TimeoutExpired."""
    with tempfile.TemporaryDirectory() as folder:
        prompts, result = Path(folder, "prompts.jsonl"), Path(folder, "result.json")
        prompts.write_bytes(b"".join(msgspec.json.encode({"prompt": text}) + b"\n" for text in texts))
        values = {
            "--backend": "openai-chat",
            "--base-url": base_url.removesuffix("/v1"),
            "--model": model,
            "--tokenizer": model,
            "--dataset-name": "custom",
            "--dataset-path": str(prompts),
            "--num-prompts": str(len(texts)),
            "--custom-output-len": str(num_tokens),
            "--max-concurrency": str(concurrency),
            "--temperature": "0",
            "--result-dir": folder,
            "--result-filename": result.name,
        }
        flags = ("--ignore-eos", "--disable-shuffle", "--no-steady-state", "--disable-tqdm")
        command = [
            str(program),
            "bench",
            "serve",
            *chain.from_iterable(values.items()),
            *flags,
            "--save-result",
            "--save-detailed",
        ]
        before = cpu_seconds(pids())
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUST_LOAD_S)
        cpu_s = cpu_seconds(pids()) - before
        if done.returncode:
            raise RuntimeError(f"vllm-rs bench serve: {done.stderr[-1000:]}")
        found = msgspec.json.decode(result.read_bytes(), type=_Measured)
    if found.failed or len(found.ttfts) != len(texts):
        raise RuntimeError(f"{base_url}: {found.failed} of {len(texts)} requests failed: {max(found.errors)[:500]}")
    return Answered(found.ttfts, list(chain(*found.itls)), found.duration, cpu_s)


_DONE = b"data: [DONE]"


async def read_stream(response: aiohttp.ClientResponse) -> tuple[bytes, list[Read]]:
    """Return the last event, or the body of a response that is not a stream, and all reads with events."""
    last = rest = b""
    reads = []
    async for piece in response.content.iter_any():
        *events, rest = (rest + piece).split(b"\n\n")
        events = [event for event in events if event != _DONE]
        if events:
            last = events[-1]
            reads.append(Read(time.perf_counter(), len(events)))
    return (last or rest).removeprefix(b"data: "), reads


def shared_gaps(reads: Sequence[Read]) -> list[float]:
    """Return the seconds between the events of a stream. Events that were read together share the gap before them, so
    that a server does not look faster for buffering tokens."""
    return [
        gap for before, (now, num_events) in pairwise(reads) for gap in [(now - before.at_s) / num_events] * num_events
    ]


def process_tree(root: int) -> list[int]:
    """Return `root` and all its descendants."""
    return [root, *descendants(root)]
