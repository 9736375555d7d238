"""`medialane bench media`: CPU time from encoded media to arrays, compared with vLLM's own media chain.

Every item goes alternately through both in one process, and the results are compared, so that equal work is timed. Time
is CPU time of all threads (`time.process_time`), because vLLM's chain is multi-threaded in places.

* Images: `decode_image` against `ImageMediaIO.load_bytes` and the array that a processor makes of it.
* Video: `open_video` and `VllmFrameSampler` against `VideoMediaIO.load_bytes` (OpenCV), 32 frames of a clip. The long
  one has a keyframe every 2 s and its samples are farther apart, so that most frames need not be decoded.
* Audio: `decode_audio` against `load_audio` with soundfile, native rate, mono.
* Body: a chat completion with a data URL of 10 MB, up to the content hash and the parsed request. Ours is `extract`,
  `content_hash`, and then what vLLM's app does with the small remaining body; theirs is that with the whole body,
  splitting and decoding the data URL, and `MultiModalHasher`.
* Fetch: files of 200 KB from a server process on the loopback interface, 32 at a time, up to their hash: `Fetcher`
  against `MediaConnector.load_from_url_async`.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pybase64
import uvloop
from numpy.typing import NDArray
from PIL import Image as PILImage
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.media import ImageMediaIO, MediaConnector, VideoMediaIO
from vllm.multimodal.media.audio import load_audio
from vllm.multimodal.media.base import MediaIO, MediaWithBytes

import media_samples as samples
from harness import Bar, Options, Report, median
from medialane.config import process_environ
from medialane.gateway import References
from medialane.gateway.intake import extract
from medialane.media import MediaConfig
from medialane.media.audio import decode_audio
from medialane.media.fetch import Fetcher
from medialane.media.image import decode_image
from medialane.media.video import open_video
from medialane.testing.tiny_model import TINY_MODEL_FLAGS, build_tiny_model, cache_folder
from medialane.types.hashing import content_hash
from medialane.types.media import MediaRef
from medialane.vllm_bridge.items import VllmFrameSampler
from medialane.vllm_bridge.seams.arguments import create_model_config, parse_vllm_args
from origin import File, origin

ABOUT = "CPU time from encoded media to arrays, compared with vLLM's own media chain"

ROUNDS, QUICK_ROUNDS = 9, 3
#: A turn is repeated for about this time, and at least once.
TURN_S = 0.1
NUM_FRAMES = 32
BODY_BYTES = 10_000_000
FETCH_BYTES, FETCHES, CONCURRENCY = 200_000, 128, 32

#: Equal chains differ by this much between runs on a shared machine: the tolerance of "not slower".
NOISE = 0.05

CONFIG = MediaConfig(
    allowed_media_networks=("127.0.0.0/8",), max_fetches=2 * CONCURRENCY, max_fetches_per_host=CONCURRENCY
)

#: The result of a chain; equal for both chains of a case.
Result = list[NDArray[Any] | str]


@dataclass(frozen=True)
class Case:
    """One kind of item, for both chains; a call processes `num_items`. `least` is the bar for the ratio of their
    times."""

    name: str
    ours: Callable[[], Result]
    theirs: Callable[[], Result]
    least: float = 1 - NOISE
    num_items: int = 1


@dataclass
class Side:
    """Turns of one chain: seconds per item."""

    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)

    def turn(self, call: Callable[[], Result], num_calls: int, num_items: int) -> None:
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(num_calls):
            call()
        self.cpu_s.append((time.process_time() - cpu) / num_calls / num_items)
        self.wall_s.append((time.perf_counter() - wall) / num_calls / num_items)


@dataclass(frozen=True)
class Measured:
    case: Case
    ours: Side
    theirs: Side

    @property
    def ratio(self) -> float:
        """The median ratio of consecutive turns: the machine's speed drifts."""
        return median(theirs / ours for ours, theirs in zip(self.ours.cpu_s, self.theirs.cpu_s, strict=True))


def run(options: Options) -> Report:
    logging.getLogger("vllm").setLevel(logging.ERROR)
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    cases = [*_images(), *_clips(quick=options.quick), _audio(), _body()]
    measured = [_measure(case, rounds) for case in cases]
    with _fetches() as case:
        measured.append(_measure(case, rounds))
    return _report(measured)


def _measure(case: Case, rounds: int) -> Measured:
    started = time.perf_counter()
    expected = case.theirs()
    num_calls = max(1, round(TURN_S / (time.perf_counter() - started)))
    _compare(case.name, case.ours(), expected)
    found = Measured(case, Side(), Side())
    for _ in range(rounds):
        found.ours.turn(case.ours, num_calls, case.num_items)
        found.theirs.turn(case.theirs, num_calls, case.num_items)
    print(f"  {case.name}: {found.ratio:.2f} times", flush=True)
    return found


def _compare(name: str, ours: Result, theirs: Result) -> None:
    for our, their in zip(ours, theirs, strict=True):
        if not np.array_equal(our, their):
            raise RuntimeError(f"{name}: the results of the two chains differ")


# Images


def _images() -> list[Case]:
    jpeg, png, webp = partial(samples.image, "JPEG", quality=90), partial(samples.image, "PNG"), samples.image
    return [
        _image("JPEG 512x384", jpeg(512, 384)),
        _image("JPEG 1024x768", jpeg(1024, 768), least=1.3),
        _image("JPEG 4000x3000", jpeg(4000, 3000), least=2.0),
        _image("PNG 1024x768", png(1024, 768)),
        _image("WebP 1024x768", webp("WEBP", 1024, 768)),
    ]


def _image(name: str, encoded: bytes, least: float = 1 - NOISE) -> Case:
    return Case(
        name,
        lambda: [decode_image(memoryview(encoded), CONFIG).pixels],
        lambda: [np.asarray(ImageMediaIO().load_bytes(encoded).media)],
        least,
    )


# Video and audio


#: vLLM's default sampler, which the tiny model's family replaces by one that samples two frames a second.
_VIDEO_IO = f'--media-io-kwargs={{"video": {{"video_backend": "opencv", "num_frames": {NUM_FRAMES}}}}}'


def _clips(*, quick: bool) -> list[Case]:
    cache = cache_folder(process_environ())
    model = create_model_config(parse_vllm_args(str(build_tiny_model(cache)), [*TINY_MODEL_FLAGS, _VIDEO_IO]))
    sampler = VllmFrameSampler(model)
    # A quick run has smaller frames, not a shorter clip: the time between samples matters.
    sparse, dense = ((320, 180, 180), (640, 360, 12)) if quick else ((640, 360, 180), (1280, 720, 60))
    found = []
    for (width, height, seconds), gop, least in ((sparse, 60, 4.0), (dense, 250, 1 - NOISE)):
        name = f"clip-{width}x{height}-{seconds}s-gop{gop}.mp4"
        encoded = samples.cached(cache / "bench-media", name, partial(samples.clip, width, height, seconds, gop=gop))
        found.append(_clip(f"H.264 {width}x{height}, {seconds} s, GOP {gop}", encoded, sampler, least))
    return found


def _clip(name: str, encoded: bytes, sampler: VllmFrameSampler, least: float) -> Case:
    def ours() -> Result:
        with open_video(memoryview(encoded), "video/mp4", CONFIG) as video:
            batch = sampler.sample(video, b"{}")
        return [batch.frames, _canonical(json.loads(batch.metadata))]

    def theirs() -> Result:
        frames, metadata = VideoMediaIO(ImageMediaIO(), num_frames=NUM_FRAMES).load_bytes(encoded).media
        return [frames, _canonical(metadata)]

    return Case(name, ours, theirs, least)


def _canonical(metadata: dict[str, Any]) -> str:
    return json.dumps(metadata, sort_keys=True, default=int)


def _audio() -> Case:
    encoded = samples.audio("MP3", 60)

    def ours() -> Result:
        found = decode_audio(memoryview(encoded), CONFIG)
        return [found.samples, str(found.sample_rate)]

    def theirs() -> Result:
        # vLLM tries torchcodec first, which needs the system's FFmpeg; if it does not load, vLLM falls back to this.
        found, rate = load_audio(io.BytesIO(encoded), sr=None, backend="soundfile")
        return [found, str(int(rate))]

    return Case("MP3 stereo, 60 s", ours, theirs)


# Body


def _body() -> Case:
    payload = pybase64.b64encode(samples.noise(BODY_BYTES * 3 // 4)).decode()
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{payload}"}},
        {"type": "text", "text": "What is in the picture?"},
    ]
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 1}).encode()

    def ours() -> Result:
        intake = extract(body, CONFIG, references=References.random())
        _parsed(intake.body)
        encoded = intake.refs[0].data or b""
        content_hash(encoded)
        return [np.frombuffer(encoded, np.uint8)]

    def theirs() -> Result:
        _, _, data = _parsed(body)[5:].partition(",")
        encoded = pybase64.b64decode(data, validate=True)
        MultiModalHasher.hash_kwargs("blake3", image=MediaWithBytes(_NO_PICTURE, encoded))
        return [np.frombuffer(encoded, np.uint8)]

    return Case("data URL of 10 MB", ours, theirs, 5.0)


_NO_PICTURE = PILImage.new("RGB", (1, 1))


def _parsed(body: bytes) -> str:
    """Return the first URL of a body, parsed as in vLLM's app: FastAPI's `request.json()`, then the request's model."""
    request: Any = ChatCompletionRequest.model_validate(json.loads(body))
    parts = [part for message in request.messages for part in message["content"]]
    url: str = parts[0]["image_url"]["url"]
    return url


# Fetch


class _Bytes(MediaIO[bytes]):  # type: ignore[misc]  # vllm is not typed
    """Media whose bytes are not decoded."""

    def load_bytes(self, data: bytes) -> bytes:
        return data

    def load_base64(self, media_type: str, data: str) -> bytes:
        raise NotImplementedError

    def load_file(self, filepath: Path) -> bytes:
        raise NotImplementedError


@contextlib.contextmanager
def _fetches() -> Iterator[Case]:
    loop = uvloop.new_event_loop()
    try:
        with origin({"file": File(samples.noise(FETCH_BYTES), "image/jpeg")}) as url:
            yield from _fetching(loop, f"{url}/file")
    finally:
        loop.close()


class _Body:
    """A fetched body on the heap, kept by its hash."""

    def __init__(self, kept: dict[str, bytearray]) -> None:
        self._kept = kept
        self._data = bytearray()

    def expect(self, num_bytes: int) -> None:
        """A bytearray grows efficiently."""

    def write(self, piece: bytes) -> None:
        self._data += piece

    def finish(self, content_hash: str) -> None:
        self._kept[content_hash] = self._data

    def abandon(self) -> None:
        self._data = bytearray()


def _fetching(loop: asyncio.AbstractEventLoop, url: str) -> Iterator[Case]:
    bodies: dict[str, bytearray] = {}
    fetcher = loop.run_until_complete(Fetcher(CONFIG, open_body=lambda *_: _Body(bodies)).__aenter__())
    connector = MediaConnector()
    numbers = count()  # every URL is fetched once

    async def our_fetch() -> NDArray[np.uint8]:
        ref = MediaRef("image", "messages[0].content[0].image_url", url=f"{url}/{next(numbers)}")
        return np.frombuffer(bodies.pop(await fetcher.fetch(ref, need_data=True)), np.uint8)

    async def their_fetch() -> NDArray[np.uint8]:
        data = await connector.load_from_url_async(f"{url}/{next(numbers)}", _Bytes(), fetch_timeout=5)
        MultiModalHasher.hash_kwargs("blake3", image=MediaWithBytes(_NO_PICTURE, data))
        return np.frombuffer(data, np.uint8)

    try:
        yield Case(
            "fetch of 200 KB, 32 at a time",
            lambda: loop.run_until_complete(_many(our_fetch)),
            lambda: loop.run_until_complete(_many(their_fetch)),
            num_items=FETCHES,
        )
    finally:
        loop.run_until_complete(fetcher.__aexit__(None, None, None))
        loop.run_until_complete(_close(connector))


async def _close(connector: MediaConnector) -> None:
    await (await connector.connection.get_async_client()).close()


async def _many(fetch: Callable[[], Any]) -> Result:
    todo = iter(range(FETCHES))
    found: Result = []

    async def client() -> None:
        for _ in todo:
            found.append(await fetch())

    await asyncio.gather(*(client() for _ in range(CONCURRENCY)))
    return found


def _report(measured: list[Measured]) -> Report:
    rows = [
        {
            "item": found.case.name,
            "CPU ms": median(found.ours.cpu_s) * 1000,
            "vLLM's CPU ms": median(found.theirs.cpu_s) * 1000,
            "ratio": found.ratio,
            "items/s": 1 / median(found.ours.wall_s),
            "vLLM's items/s": 1 / median(found.theirs.wall_s),
        }
        for found in measured
    ]
    bars = [
        Bar(f"media: {found.case.name}, vLLM's CPU time over ours", found.ratio, found.case.least, "at least")
        for found in measured
    ]
    return Report("media", {"one process, CPU time of all threads": rows}, bars)
