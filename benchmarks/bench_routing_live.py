"""Repeated images, and sessions, over two real vLLM workers: cache-aware routing with embeddings kept on the host, and
round-robin without.

Two pairs of workers, each with a store and a gateway of its own, used alternately with separate images and texts.

`repeated images`: the images of a turn fit in the KV caches of both workers together but not in one: with round-robin
they evict each other, like the hot images of a larger fleet. There are several requests about each image, each time in
another order. The first time is not counted; the second is that of a follow-up question, and is reported separately:
later ones find an image at both workers of a round-robin if it was not evicted. How often it was depends on the ratio
of images to capacity: a worker has space for seven, and there are ten, twelve, and fourteen.

`sessions`: a scaled-down trace of `traces/`: hot images, follow-up questions, shared system prompts; in its order, but
not at its times. `cached` is the share of prompt tokens that were cache hits, as reported by the engines.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from harness import Bar, Options, Report, median, percentile
from load import data_url, image_request, send
from medialane.testing.sample_media import sample_jpeg
from medialane.testing.tiny_model import TINY_MODEL_FLAGS, build_tiny_model, cache_folder
from traces import SessionTrace, Turn, session_turns
from worker_pairs import worker_pair

ABOUT = "repeated images over two real workers: TTFT with cache-aware routing and with round-robin"

OURS, PEER = "cost", "round-robin"
SIZE = (1024, 768)
NUMS_PICTURES, ASKED_EACH = (10, 12, 14), 5
CONCURRENCY = 2
#: An image takes 8 blocks of 128 tokens: seven images fit in a worker, with space for the running requests.
FLAGS = (*TINY_MODEL_FLAGS, "--max-model-len=4096", "--num-gpu-blocks-override=64")
#: Sessions whose prompts fit in the tiny model's context: a word of the trace is about two tokens.
SESSIONS = SessionTrace(
    num_turns=60,
    num_system_prompts=3,
    system_prompt=(60, 200),
    num_images=12,
    image=(1, 1),
    question=(5, 20),
    answer=(5, 10),
    images_of_first=(0.2, 0.5, 0.3),
    max_turns=6,
)
SESSION_IMAGE = (512, 384)


def run(options: Options) -> Report:
    return asyncio.run(_run(options))


async def _run(options: Options) -> Report:
    model = str(build_tiny_model(cache_folder(os.environ)))
    repeated = {number: Repeated() for number in NUMS_PICTURES}
    sessions: dict[str, list[float]] = {OURS: [], PEER: []}
    cached: dict[str, float] = {}
    rounds = options.rounds or (2 if options.quick else 4)
    async with _servers(model) as urls:
        for turn in range(rounds):
            for number, times in repeated.items():
                for name in _in_turns(turn):
                    await times.measure(name, model, url=urls[name], number=number, turn=turn)
        before = {name: await _prompt_tokens(url) for name, url in urls.items()}
        for turn in range(max(1, rounds // 2)):
            for name in _in_turns(turn):
                sessions[name] += await _sessions(model, urls[name], seed=2 * turn + (name == PEER))
        for name, url in urls.items():
            tokens, hits = (now - then for now, then in zip(await _prompt_tokens(url), before[name], strict=True))
            cached[name] = hits / tokens
    report = Report("routing_live")
    report.tables["repeated images"] = [
        {"pictures": number, **row} for number, times in repeated.items() for row in times.rows()
    ]
    report.tables["sessions"] = [{**_row(name, ttft_s), "cached": cached[name]} for name, ttft_s in sessions.items()]
    for number, times in repeated.items():
        report.bars += times.bars(number)
    return report


class Repeated:
    """TTFT, in seconds, of requests about this many images: the second request about each, and later ones."""

    def __init__(self) -> None:
        self.again: dict[str, list[float]] = {OURS: [], PEER: []}
        self.later: dict[str, list[float]] = {OURS: [], PEER: []}

    async def measure(self, name: str, model: str, *, url: str, number: int, turn: int) -> None:
        seed = 1000 * number + 2 * turn + (name == PEER)
        second, *others = await _repeated_images(model, url, number, seed=seed)
        self.again[name] += second
        self.later[name] += [each_s for ttft_s in others for each_s in ttft_s]

    def rows(self) -> list[dict[str, object]]:
        return [
            {"asked": asked, **_row(name, ttft_s[name])}
            for asked, ttft_s in (("the second time", self.again), ("later", self.later))
            for name in (OURS, PEER)
        ]

    def bars(self, number: int) -> list[Bar]:
        every = {name: median(self.again[name] + self.later[name]) for name in (OURS, PEER)}
        second = {name: median(self.again[name]) for name in (OURS, PEER)}
        return [
            Bar(f"{number} images, all repeats: TTFT p50 / round-robin", every[OURS] / every[PEER], 0.5, "at most"),
            Bar(
                f"{number} images, the second time: TTFT p50 / round-robin", second[OURS] / second[PEER], 0.5, "at most"
            ),
        ]


def _in_turns(turn: int) -> tuple[str, str]:
    return (OURS, PEER) if turn % 2 == 0 else (PEER, OURS)


def _row(name: str, ttft_s: list[float]) -> dict[str, object]:
    return {
        "router": name,
        "n": len(ttft_s),
        "ttft_p50_ms": 1000 * median(ttft_s),
        "ttft_p90_ms": 1000 * percentile(ttft_s, 0.9),
    }


async def _repeated_images(model: str, url: str, number: int, *, seed: int) -> list[list[float]]:
    """Return the TTFT of the requests about all images, in seconds: for the second time, the third, ..."""
    images = [data_url(sample_jpeg(100 * seed + n, *SIZE)) for n in range(number)]
    shuffled = random.Random(seed)
    ttft_s = []
    for time in range(ASKED_EACH):
        bodies = [image_request(model, image, f"Question {time}: what is it?") for image in images]
        shuffled.shuffle(bodies)
        ttft_s.append((await send(url, bodies, concurrency=CONCURRENCY, pids=list)).ttft_s)
    return ttft_s[1:]


async def _sessions(model: str, url: str, *, seed: int) -> list[float]:
    """Return the TTFT of all requests of a trace, in seconds."""
    bodies = [_session_request(model, turn, seed) for turn in session_turns(SESSIONS._replace(seed=seed))]
    return (await send(url, bodies, concurrency=CONCURRENCY, pids=list)).ttft_s


def _session_request(model: str, turn: Turn, seed: int) -> bytes:
    """Build the turn's prompt as one message: its words as numbers, and its images."""
    content: list[dict[str, object]] = []
    done = 0
    for span in turn.media:
        url = data_url(sample_jpeg(int(span.mm_hash[:6], 16) + seed, *SESSION_IMAGE))
        content.append({"type": "text", "text": _words(turn.token_ids[done : span.offset])})
        content.append({"type": "image_url", "image_url": {"url": url}})
        done = span.offset + span.length
    content.append({"type": "text", "text": _words(turn.token_ids[done:])})
    messages = [{"role": "user", "content": content}]
    body = {"model": model, "messages": messages, "max_tokens": 1, "temperature": 0, "stream": True}
    return json.dumps(body).encode()


def _words(ids: Sequence[int]) -> str:
    return " ".join(str(number % 1000) for number in ids)


async def _prompt_tokens(url: str) -> tuple[float, float]:
    """Return the tokens of all prompts so far, and those that were cache hits."""
    async with aiohttp.ClientSession() as session, session.get(f"{url.removesuffix('/v1')}/metrics") as response:
        page = await response.text()
    samples = [s for family in text_string_to_metric_families(page) for s in family.samples]
    tokens = {s.labels["kind"]: s.value for s in samples if s.name == "medialane_prompt_tokens_total"}
    return tokens.get("all", 0.0), tokens.get("engine_cached", 0.0)


@asynccontextmanager
async def _servers(model: str) -> AsyncIterator[dict[str, str]]:
    """Run two pairs of workers, each with a gateway: router -> base URL."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ml-bench-")))
        urls: dict[str, str] = {}
        for router, cache in ((OURS, "on"), (PEER, "off")):
            pair = worker_pair(folder, model, name=router, routers=[router], flags=FLAGS, encode_cache=cache)
            urls |= await stack.enter_async_context(pair)
        yield urls
