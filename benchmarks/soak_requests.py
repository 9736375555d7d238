"""The requests of a soak: a reproducible mix, and the expected statuses of each."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import pybase64

import media_samples as samples
from medialane.testing.sample_media import sample_jpeg
from origin import File

Kind = Literal["new image", "known image", "image by URL", "two images", "video", "sound", "text", "hostile"]

#: Per mille. The client of one request in ten, of any kind, disconnects early. Most are cheap: what is looked for are
#: leaks and wrong answers, which depend on the number of requests and not on what each costs.
MIX: Mapping[Kind, int] = {
    "text": 500,
    "known image": 250,
    "new image": 100,
    "image by URL": 50,
    "two images": 25,
    "video": 15,
    "sound": 30,
    "hostile": 30,
}
ABORTED = 0.10
#: A client that disconnects does so within this time: while it sends, while media are prepared, or during the stream.
MAX_PATIENCE_S = 0.25

#: Of each choice.
NUM_TOKENS = 6
NUM_CHOICES = (1, 1, 1, 1, 1, 1, 1, 1, 1, 3)

_SIZES = ((224, 168), (336, 252), (512, 384))
#: Number of repeated images, and of files of the web server.
_NUM_KNOWN = 24
#: Start of a JPEG: the SOI marker, and a comment of nine characters, so that equal images have different bytes.
_HEAD = b"\xff\xd8\xff\xfe\x00\x0b%09d"


@dataclass(frozen=True)
class Request:
    """`patience_s` is when the client disconnects, None if it waits. `expected` are the allowed statuses. An answer has
    `num_choices`, each with its own seed, from `seed` on."""

    kind: Kind
    body: bytes
    expected: frozenset[int]
    patience_s: float | None = None
    num_choices: int = 1
    seed: int = 0


class Requests:
    """Generates requests, deterministically for a seed."""

    def __init__(self, model: str, url: str, *, seed: int = 0) -> None:
        """`url` is that of an origin of `files`."""
        self._model = model
        self._url = url
        self._random = random.Random(seed)
        self._jpegs = [sample_jpeg(number, *size)[2:] for number, size in enumerate(_SIZES)]
        self._clip = samples.clip(160, 120, 1, gop=30)
        self._audio = samples.audio("WAV", 0.5)
        self._num_new = 0
        self._hostile = [json.dumps(part).encode() for part in _hostile_parts(self._jpegs[0])]

    def make(self, num_requests: int) -> Iterator[Request]:
        kinds = list(MIX)
        for kind in self._random.choices(kinds, [MIX[kind] for kind in kinds], k=num_requests):
            yield self._make(kind)

    def one(self, kind: Kind) -> Request:
        """Return one request of a kind, whose client waits."""
        num_choices, seed = self._random.choice(NUM_CHOICES), self._random.randrange(1000)
        body = self._body(kind, num_choices, seed)
        return Request(kind, body, _EXPECTED.get(kind, _FINE), num_choices=num_choices, seed=seed)

    def _make(self, kind: Kind) -> Request:
        patience_s = self._random.uniform(0, MAX_PATIENCE_S) if self._random.random() < ABORTED else None
        return replace(self.one(kind), patience_s=patience_s)

    def _body(self, kind: Kind, num_choices: int, seed: int) -> bytes:
        parts = [*self._media(kind), b'{"type":"text","text":"What is it? %d"}' % self._random.randrange(1000)]
        stream = b',"stream":true,"stream_options":{"include_usage":true}' if self._random.random() < 0.7 else b""
        head = b'{"model":%s,"max_tokens":%d,"n":%d,"seed":%d%s,"return_token_ids":true,'
        head %= json.dumps(self._model).encode(), NUM_TOKENS, num_choices, seed, stream
        return b'%s"messages":[{"role":"user","content":[%s]}]}' % (head, b",".join(parts))

    def _media(self, kind: Kind) -> list[bytes]:
        if kind == "new image":
            return [self._image(new=True)]
        if kind == "two images":
            return [self._image(new=True), self._image(new=False)]
        if kind == "known image":
            return [self._image(new=False)]
        if kind == "image by URL":
            known = self._random.randrange(_NUM_KNOWN) if self._random.random() < 0.7 else self._new()
            name = self._random.choice(("stored", "unstored"))
            return [_part("image_url", f"{self._url}/{name}/{known}".encode())]
        if kind == "video":
            return [_part("video_url", _data_url("video/mp4", self._clip + _free_box(self._new() % 1000)))]
        if kind == "sound":
            return [_part("audio_url", _data_url("audio/wav", self._audio + _riff_chunk(self._new() % 1000)))]
        return [self._random.choice(self._hostile)] if kind == "hostile" else []

    def _new(self) -> int:
        self._num_new += 1
        return _NUM_KNOWN + self._num_new

    def _image(self, *, new: bool) -> bytes:
        number = self._new() if new else self._random.randrange(_NUM_KNOWN)
        jpeg = self._jpegs[number % len(self._jpegs)]
        return _part("image_url", _data_url("image/jpeg", _HEAD % number + jpeg))


#: High enough that no request here is rejected, not even with 503.
_FINE = frozenset((200,))
_EXPECTED: Mapping[Kind, frozenset[int]] = {"hostile": frozenset((400, 413, 415, 502))}


def files() -> dict[str, File]:
    """Return the files of the web server: an image that may be cached for a second, and one that must be
    revalidated."""
    jpeg = sample_jpeg(99, 320, 240)
    return {
        "stored": File(jpeg, "image/jpeg", {"Cache-Control": "max-age=1", "ETag": '"1"'}),
        "unstored": File(jpeg, "image/jpeg", {"Cache-Control": "no-store"}),
        "page": File(b"<html>not found, but 200</html>", "text/html"),
    }


#: An ID3 tag whose header claims a quarter of a gigabyte.
_ENDLESS_TAG = b"ID3\4\0\0\x7f\x7f\x7f\x7f" + bytes(10_000)


def _hostile_parts(jpeg: bytes) -> list[dict[str, Any]]:
    """Return media parts that must be rejected, each by a different package."""
    huge = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (65000).to_bytes(4, "big") * 2 + b"\x08\x02\0\0\0" + bytes(64)
    urls = [
        "http://169.254.169.254/latest/meta-data/",
        "http://good.example\\@127.0.0.1/",
        "ftp://example.com/a.jpg",
        "data:image/jpeg,not-base64",
        "data:image/jpeg;base64,====",
        _data_url("image/jpeg", b"\xff\xd8" + jpeg[: len(jpeg) // 2]).decode(),
        _data_url("image/png", huge).decode(),
        _data_url("image/svg+xml", b"<svg xmlns='http://www.w3.org/2000/svg'/>").decode(),
        _data_url("image/jpeg", samples.noise(50_000)).decode(),
    ]
    return [{"type": "image_url", "image_url": {"url": url}} for url in urls] + [
        {"type": "video_url", "video_url": {"url": _data_url("video/mp4", b"#EXTM3U\nhttp://127.0.0.1/").decode()}},
        {"type": "audio_url", "audio_url": {"url": _data_url("audio/wav", samples.noise(20_000)).decode()}},
        {"type": "audio_url", "audio_url": {"url": _data_url("audio/flac", b"fLaC\0\0\0\x22" + bytes(60)).decode()}},
        {"type": "audio_url", "audio_url": {"url": _data_url("audio/mpeg", _ENDLESS_TAG).decode()}},
        {"type": "image_url", "image_url": {"url": "medialane:0"}},
    ]


def _part(name: str, url: bytes) -> bytes:
    field = name.encode()
    return b'{"type":"%s","%s":{"url":"%s"}}' % (field, field, url)


def _data_url(media_type: str, content: bytes) -> bytes:
    return b"data:%s;base64,%s" % (media_type.encode(), pybase64.b64encode(content))


def _free_box(number: int) -> bytes:
    """Return an MP4 box that players ignore, to append to a file (ISO/IEC 14496-12, 8.1.2)."""
    return (16).to_bytes(4, "big") + b"free" + number.to_bytes(8, "big")


def _riff_chunk(number: int) -> bytes:
    """Return a RIFF chunk that players ignore, to append to a WAV file."""
    return b"note" + (8).to_bytes(4, "little") + number.to_bytes(8, "little")
