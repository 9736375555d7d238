"""Media of the check as parts of messages. They are generated: nothing is read from the network."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import numpy as np
from PIL import Image

from medialane.testing.sample_audio import sample_audio
from medialane.testing.sample_images import sample_jpeg, sample_pixels
from medialane.testing.sample_video import sample_video
from medialane.tools.check.case import Part


def text(words: str) -> Part:
    return {"type": "text", "text": words}


@cache
def image(seed: int, width: int = 512, height: int = 384) -> Part:
    """Return a JPEG of this size; different seeds give unrelated pictures."""
    return image_file(sample_jpeg(seed, width, height), "image/jpeg")


@cache
def image_in_mode(seed: int, mode: str, width: int = 320, height: int = 240) -> Part:
    """Return a PNG as `picture` makes it."""
    return image_file(picture(seed, mode, width, height), "image/png")


def picture(seed: int, mode: str, width: int = 320, height: int = 240) -> bytes:
    """Return a PNG with Pillow's `mode`: "RGBA" fades to transparent, "L" is grey, "P" has a palette."""
    made = Image.fromarray(sample_pixels(seed, width, height))
    if mode == "RGBA":
        fade = np.linspace(0, 255, width * height).reshape(height, width).astype(np.uint8)
        made.putalpha(Image.fromarray(fade))
    out = io.BytesIO()
    (made if made.mode == mode else made.convert(mode)).save(out, "PNG")
    return out.getvalue()


def image_file(data: bytes, media_type: str) -> Part:
    return {"type": "image_url", "image_url": {"url": data_url(data, media_type)}}


@cache
def video(seed: int, num_frames: int = 24, width: int = 224, height: int = 168, *, fps: int = 12) -> Part:
    data = sample_video(seed, num_frames, width, height, fps=fps)
    return {"type": "video_url", "video_url": {"url": data_url(data, "video/mp4")}}


@cache
def audio(pitch_hz: int, seconds: float = 1.5, **form: Any) -> Part:
    """Return a tone; `form` are sample_audio's options."""
    data = sample_audio(pitch_hz, seconds, **form)
    return {"type": "audio_url", "audio_url": {"url": data_url(data, f"audio/{form.get('container', 'wav').lower()}")}}


def input_audio(pitch_hz: int, seconds: float = 1.5) -> Part:
    """Return a tone in OpenAI's form."""
    data = base64.b64encode(sample_audio(pitch_hz, seconds)).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def data_url(data: bytes, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


#: One item of each modality, and another one.
ONE: Mapping[str, Callable[[], Part]] = {
    "image": partial(image, 0),
    "video": partial(video, 0),
    "audio": partial(audio, 440),
}
OTHER: Mapping[str, Callable[[], Part]] = {
    "image": partial(image, 1, 301, 422),
    "video": partial(video, 1, 40, 192, 168),
    "audio": partial(audio, 900, 3.1),
}


def small(modality: str) -> Part:
    """Return an item that is small in bytes."""
    return {
        "image": partial(image, 2, 57, 31),
        "video": partial(video, 2, 4, 64, 48),
        "audio": partial(audio, 300, 0.3),
    }[modality]()


def damaged(modality: str) -> Part:
    """Return an item of which only the beginning is left."""
    part = {"image": partial(image, 3, 200, 150), "video": partial(video, 3, 8), "audio": partial(audio, 350)}[
        modality
    ]()
    key = f"{modality}_url"
    head, _, data = part[key]["url"].partition(",")
    return {"type": key, key: {"url": f"{head},{data[:40]}"}}
