"""Bodies of requests that are rendered, each with media that no other one has, unless they are to be repeated.

New media are cheap: a comment, a box or samples with a number make the bytes of a file new, not what it shows.
"""

from __future__ import annotations

import os
import struct
from functools import cache

import msgspec
import pybase64

from media_samples import cached, clip
from medialane.testing.sample_media import sample_audio, sample_jpeg
from medialane.testing.tiny_model import cache_folder

NUM_IMAGES = 4
WIDTH, HEIGHT = 1280, 720
VIDEO_SIZE, VIDEO_S = (640, 360), 10.0
AUDIO_S, AUDIO_RATE = 60.0, 16_000

#: In the data of a WAV file, whose header has 44 bytes.
_SAMPLES_AT = 44 + AUDIO_RATE

Part = dict[str, object]


def images(number: int, *, width: int = WIDTH, height: int = HEIGHT) -> list[Part]:
    """Return the images of request `number`, all of one size, and a text."""
    made = [_jpeg(seed, width, height) for seed in range(NUM_IMAGES)]
    return [*(_image(_with_comment(jpeg, number)) for jpeg in made), _text("What do these pictures have in common?")]


def sized_images(number: int) -> list[Part]:
    """Return images of a size that no other request has, which all have about as many tokens."""
    return images(number, width=WIDTH - 300 + 2 * (number % 150), height=HEIGHT - 16 * (number // 150))


def small_image(number: int) -> list[Part]:
    """Return an image of about 200 KB, and a text."""
    return [_image(_with_comment(small_jpeg(), number)), _text("What is in the picture?")]


def video(number: int) -> list[Part]:
    return [_media("video_url", "video/mp4", _with_box(_clip(), number)), _text("What happens?")]


def audio(number: int) -> list[Part]:
    wav = sample_audio(440.0, AUDIO_S, rate=AUDIO_RATE)
    named = wav[:_SAMPLES_AT] + struct.pack("<q", number) + wav[_SAMPLES_AT + 8 :]
    return [_media("audio_url", "audio/wav", named), _text("What is said?")]


def body(model: str, content: list[Part], **fields: object) -> bytes:
    """Return a chat request with this content."""
    return msgspec.json.encode({"model": model, "messages": [{"role": "user", "content": content}], **fields})


@cache
def small_jpeg() -> bytes:
    return sample_jpeg(0, 1024, 768, quality=88)


def _image(jpeg: bytes) -> Part:
    return _media("image_url", "image/jpeg", jpeg)


def _media(kind: str, media_type: str, data: bytes) -> Part:
    return {"type": kind, kind: {"url": f"data:{media_type};base64,{pybase64.b64encode(data).decode()}"}}


def _text(text: str) -> Part:
    return {"type": "text", "text": text}


@cache
def _clip() -> bytes:
    name = f"clip-{VIDEO_SIZE[0]}x{VIDEO_SIZE[1]}-{VIDEO_S:g}s.mp4"
    return cached(cache_folder(os.environ) / "bench", name, lambda: clip(*VIDEO_SIZE, VIDEO_S, gop=60))


_MOST_SIZES = 16
_jpegs: dict[tuple[int, int, int], bytes] = {}


def _jpeg(seed: int, width: int, height: int) -> bytes:
    """Return a photo; photos of the latest sizes are kept."""
    key = seed, width, height
    if key not in _jpegs:
        if len(_jpegs) >= _MOST_SIZES:
            del _jpegs[next(iter(_jpegs))]
        _jpegs[key] = sample_jpeg(seed, width, height)
    return _jpegs[key]


def _with_comment(jpeg: bytes, number: int) -> bytes:
    """Return the JPEG with a comment (COM) after its first marker."""
    return jpeg[:2] + b"\xff\xfe\x00\x0b%09d" % number + jpeg[2:]


def _with_box(mp4: bytes, number: int) -> bytes:
    """Return the MP4 with a box of free space at its end."""
    return mp4 + struct.pack(">I4sq", 16, b"free", number)
