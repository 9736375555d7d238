"""Generated images, clips and audio for benchmarks, encoded like users' files."""

from __future__ import annotations

import io
import os
import random
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import soundfile
from PIL import Image

from medialane.testing.sample_media import sample_pixels

FPS = 30
_SAMPLE_RATE = 44100


def cached(folder: Path, name: str, make: Callable[[], bytes]) -> bytes:
    """Return the result of `make`, cached as `name` in a folder: encoding a clip takes a minute. A name must identify
    the recipe."""
    path = folder / name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(make())
        unfinished.replace(path)
    return path.read_bytes()


def image(kind: str, width: int, height: int, **options: object) -> bytes:
    """Return a photo-like image in one of Pillow's formats."""
    buffer = io.BytesIO()
    Image.fromarray(sample_pixels(0, width, height)).save(buffer, kind, **options)
    return buffer.getvalue()


def clip(width: int, height: int, seconds: float, *, gop: int, seed: int = 0) -> bytes:
    """Return an H.264 MP4 of 30 frames a second: a camera that pans over a large photo, a keyframe every `gop`
    frames."""
    buffer = io.BytesIO()
    num_frames = round(seconds * FPS)
    scene = sample_pixels(seed, width * 2, height * 2)
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=FPS)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.options = {"preset": "superfast", "crf": "26", "g": str(gop), "sc_threshold": "0"}
        for number in range(num_frames):
            along = number / max(1, num_frames - 1)
            x, y = int(along * width), int((0.5 - 0.5 * np.cos(along * 20)) * height)
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(scene[y : y + height, x : x + width]), "rgb24")
            frame.pts, frame.time_base = number, Fraction(1, FPS)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def audio(kind: str, seconds: float, *, seed: int = 0, num_channels: int = 2) -> bytes:
    """Return chords of rising tones in one of libsndfile's formats."""
    rng = np.random.default_rng(seed)
    time = np.arange(round(seconds * _SAMPLE_RATE)) / _SAMPLE_RATE
    channels = []
    for _ in range(num_channels):
        tones = [np.sin(2 * np.pi * pitch * (time + 0.01 * time**2)) for pitch in rng.uniform(100, 2000, 4)]
        channels.append(sum(tones) / 8 + rng.standard_normal(time.shape) * 0.01)
    buffer = io.BytesIO()
    soundfile.write(buffer, np.stack(channels, axis=1).astype(np.float32), _SAMPLE_RATE, format=kind)
    return buffer.getvalue()


def noise(num_bytes: int) -> bytes:
    """Return incompressible bytes; always the same ones."""
    return random.Random(0).randbytes(num_bytes)
