"""Generates images, audio, video and documents for demos, checks, tests and benchmarks that need realistic sizes
without shipping recordings.

The cost of coding a photo results from the correlation of neighbouring pixels on every scale. So the JPEGs have a lit
sky, hills and discs with hard edges, and noise summed over octaves, from coarse and strong to fine and faint.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import lru_cache

import av
import numpy as np
import soundfile
from numpy.typing import NDArray
from PIL import Image

#: Grain in pixels and strength of the noise in grey levels, per octave; sets the JPEG's bytes per pixel.
_NOISE_LEVELS = ((64, 40.0), (16, 22.0), (4, 12.0), (1, 7.0))

Pixels = NDArray[np.float32]


def sample_jpeg(seed: int, width: int = 1024, height: int = 768, *, quality: int = 90) -> bytes:
    """Return one JPEG. Equal arguments give equal bytes; different seeds give unrelated images."""
    buffer = io.BytesIO()
    Image.fromarray(sample_pixels(seed, width, height)).save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def sample_pixels(seed: int, width: int, height: int) -> NDArray[np.uint8]:
    """Return the image of `sample_jpeg` before compression: [height, width, 3], RGB."""
    rng = np.random.default_rng([seed, width, height])
    image = _sky(rng, width, height)
    for depth in range(3):
        _paint_hill(rng, image, depth)
    for _ in range(int(rng.integers(4, 9))):
        _paint_disc(rng, image)
    image += _texture(rng, width, height)
    return np.clip(image, 0, 255).astype(np.uint8)


def _colour(rng: np.random.Generator) -> Pixels:
    return rng.uniform(20, 235, 3).astype(np.float32)


def _sky(rng: np.random.Generator, width: int, height: int) -> Pixels:
    top, bottom = _colour(rng), _colour(rng)
    down = np.linspace(0, 1, height, dtype=np.float32)[:, None, None]
    across = np.linspace(-20, 20, width, dtype=np.float32)[None, :, None]
    return top + (bottom - top) * down + across


def _paint_hill(rng: np.random.Generator, image: Pixels, depth: int) -> None:
    height, width, _ = image.shape
    x = np.linspace(0, 2 * np.pi, width, dtype=np.float32)
    ridge = sum(np.sin(x * k + rng.uniform(0, 6.3)) / k for k in (1, 2, 3, 5, 8)) * height * 0.08
    line = height * (0.45 + 0.18 * depth) + ridge
    image[np.arange(height)[:, None] >= line[None, :]] = _colour(rng)


def _paint_disc(rng: np.random.Generator, image: Pixels) -> None:
    height, width, _ = image.shape
    radius = rng.uniform(0.04, 0.15) * min(height, width)
    x = (np.arange(width, dtype=np.float32) - rng.uniform(0, width))[None, :]
    y = (np.arange(height, dtype=np.float32) - rng.uniform(0, height))[:, None]
    inside = x * x + y * y < radius * radius
    light = 1 - 0.5 * (x + y) / (2 * radius)
    image[inside] = (_colour(rng) * light[..., None])[inside]


def _texture(rng: np.random.Generator, width: int, height: int) -> Pixels:
    """Return noise with about the same energy in each octave; mostly grey, like the light of a scene."""
    total = np.zeros((height, width, 3), np.float32)
    for grain, strength in _NOISE_LEVELS:
        small = rng.standard_normal((-(-height // grain) + 1, -(-width // grain) + 1), dtype=np.float32)
        enlarged = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
        total += np.asarray(enlarged)[..., None] * rng.uniform(0.7, 1.0, 3).astype(np.float32) * strength
    return total


@lru_cache(maxsize=256)
def sample_audio(
    pitch_hz: float, seconds: float = 1.5, *, rate: int = 16000, container: str = "WAV", channels: int = 1
) -> bytes:
    """Return a tone with two overtones that swells and fades: unlike a noise's, its spectrum varies.

    `container` is a format of libsndfile. With several channels, each is fainter than the one before. Equal arguments
    give equal bytes.
    """
    time = np.arange(int(seconds * rate)) / rate
    wave = sum(np.sin(2 * np.pi * pitch_hz * k * time) / k for k in (1, 2, 3)) * 0.3 * np.sin(np.pi * time / seconds)
    samples = np.stack([wave / (1 + number) for number in range(channels)], axis=1).astype(np.float32)
    out = io.BytesIO()
    soundfile.write(out, samples, rate, format=container)
    return out.getvalue()


#: By how many pixels the camera moves from one frame to the next.
_PAN = 4


@lru_cache(maxsize=256)
def sample_video(seed: int, num_frames: int = 24, width: int = 224, height: int = 168, *, fps: int = 12) -> bytes:
    """Return an MP4 with what a camera sees that moves over a photo-like picture.

    The coding is H.264, whose decoders all give the same pixels. Equal arguments give equal bytes, clips of different
    seeds are unrelated. Width and height must be even.
    """
    scene = sample_pixels(seed, width + _PAN * num_frames, height)
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("libx264", rate=fps, options={"preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.thread_count = 1
        for index in range(num_frames):
            seen = np.ascontiguousarray(scene[:, _PAN * index : _PAN * index + width])
            frame = av.VideoFrame.from_ndarray(seen, format="rgb24").reformat(format="yuv420p")
            frame.pts = index
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return out.getvalue()


def sample_pdf(pages: Sequence[str], *, width: int = 595, height: int = 842, font_size: int = 12) -> bytes:
    """Return a document with a page for each of these texts, in lines, of `width` x `height` points (A4).

    Equal arguments give equal bytes; a page is the same whatever others there are.
    """
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects = [
        "<</Type/Catalog/Pages 2 0 R>>",
        f"<</Type/Pages/Count {len(pages)}/Kids[{kids}]>>",
        "<</Type/Font/Subtype/Type1/BaseFont/Helvetica/Encoding/WinAnsiEncoding>>",
    ]
    for number, text in enumerate(pages):
        escaped = text.replace("\\", r"\\").replace("(", r"\(").replace(")", r"\)")
        lines = "".join(f"({line}) Tj T*\n" for line in escaped.splitlines())
        drawn = f"BT /F {font_size} Tf {font_size * 1.2:g} TL {4 * font_size} {height - 5 * font_size} Td\n{lines}ET"
        box, font = f"/MediaBox[0 0 {width} {height}]", "/Resources<</Font<</F 3 0 R>>>>"
        objects += [
            f"<</Type/Page/Parent 2 0 R{box}{font}/Contents {5 + 2 * number} 0 R>>",
            f"<</Length {len(drawn)}>>\nstream\n{drawn}\nendstream",
        ]
    return pdf_of(objects)


def pdf_of(objects: Sequence[str], *, trailer: str = "") -> bytes:
    """Return a PDF file of these objects, numbered from 1, the first is its catalog; with further entries of its
    `trailer`. Characters are of Latin-1."""
    body, starts = bytearray(b"%PDF-1.7\n"), list[int]()
    for number, content in enumerate(objects, 1):
        starts.append(len(body))
        body += f"{number} 0 obj\n{content}\nendobj\n".encode("latin-1")
    entries = "".join(f"{start:010} 00000 n \n" for start in starts)
    size = len(objects) + 1
    table = f"xref\n0 {size}\n0000000000 65535 f \n{entries}trailer\n<</Size {size}/Root 1 0 R{trailer}>>"
    return bytes(body) + f"{table}\nstartxref\n{len(body)}\n%%EOF\n".encode()
