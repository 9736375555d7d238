"""Two real vLLM workers that keep embeddings, and two that do not: images that are new, known to the host but new to
the worker, and known to the worker.

Each pair has a store and a gateway of its own, whose router takes the workers in turn. The images of a turn are asked
about three times, each time with another question: the first request about an image is sent to one worker, the second
to the other, the third to the first again, so that the second has the image in no cache of its worker, and the third in
all. One request at a time: with more, two cores would measure the queue. The pairs take turns, A B B A ...; figures are
medians over all requests, ratios those of the medians.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path

import aiohttp

from harness import Bar, Options, Report, median, percentile
from load import data_url, image_request, send
from medialane.testing.sample_media import sample_jpeg
from medialane.testing.tiny_model import TINY_MODEL_FLAGS, build_tiny_model, cache_folder
from servers import settle
from worker_pairs import worker_pair

ABOUT = (
    "embeddings kept on the host: TTFT of images new, known to the other worker, and known, against --encode-cache off"
)

SIZES = ((512, 384), (1024, 768))
ROUND_ROBIN = "round-robin"
ON, OFF = "on", "off"
#: How the image is known to the worker that gets the request.
KINDS = ("new", "known to the other worker", "known to the worker")

Times = dict[tuple[str, tuple[int, int], str], list[float]]


def run(options: Options) -> Report:
    return asyncio.run(_run(options))


async def _run(options: Options) -> Report:
    model = str(build_tiny_model(cache_folder(os.environ)))
    times: Times = {}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ml-bench-")))
        urls = {}
        for cache in (ON, OFF):
            pair = worker_pair(
                folder, model, name=cache, routers=[ROUND_ROBIN], flags=TINY_MODEL_FLAGS, encode_cache=cache
            )
            urls[cache] = (await stack.enter_async_context(pair))[ROUND_ROBIN]
        for url in urls.values():
            await _warm_up(model, url)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        for _ in range(options.rounds or (2 if options.quick else 6)):
            for size in SIZES:
                await _turn(times, model, urls, session, size=size, num_images=3 if options.quick else 7)
    return _report(times)


#: Before each request.
_PAUSE_S = 0.05

#: Seeds of images: none is used twice in a run.
_SEEDS = count(1000)


async def _turn(
    times: Times,
    model: str,
    urls: Mapping[str, str],
    session: aiohttp.ClientSession,
    *,
    size: tuple[int, int],
    num_images: int,
) -> None:
    """Ask about an odd number of images three times each, so that a worker's turn changes with every question."""
    await settle()
    images = {cache: [data_url(sample_jpeg(next(_SEEDS), *size)) for _ in range(num_images)] for cache in urls}
    for number, kind in enumerate(KINDS):
        for turn in range(num_images):
            for cache in (ON, OFF) if turn % 2 == 0 else (OFF, ON):
                await asyncio.sleep(_PAUSE_S)
                body = image_request(model, images[cache][turn], f"Question {number}: what is it?")
                answered = await send(urls[cache], [body], concurrency=1, pids=list, session=session)
                times.setdefault((cache, size, kind), []).extend(answered.ttft_s)


async def _warm_up(model: str, url: str) -> None:
    bodies = [image_request(model, data_url(sample_jpeg(next(_SEEDS), *size))) for size in SIZES for _ in range(4)]
    await send(url, bodies, concurrency=1, pids=list)


def _report(times: Times) -> Report:
    report = Report("encode")
    rows = report.tables["encode"] = []
    for size in SIZES:
        name = f"{size[0]}x{size[1]}"
        for kind in KINDS:
            ours, theirs = (times[cache, size, kind] for cache in (ON, OFF))
            for cache, found in ((ON, ours), (OFF, theirs)):
                rows.append(
                    {
                        "image": name,
                        "kind": kind,
                        "encode cache": cache,
                        "n": len(found),
                        "ttft_p50_ms": 1000 * median(found),
                        "ttft_p90_ms": 1000 * percentile(found, 0.9),
                    }
                )
            ratio = median(ours) / median(theirs)
            most = {"new": 1.03, "known to the other worker": 0.5}.get(kind)
            if most is not None:
                report.bars.append(Bar(f"{name}, {kind}: TTFT p50 / --encode-cache off", ratio, most, "at most"))
    return report
