"""Generates photo-like JPEGs for demos, tests and benchmarks that need realistic sizes without shipping photos.

The cost of coding a photo results from the correlation of neighbouring pixels on every scale. So these images have a
lit sky, hills and discs with hard edges, and noise summed over octaves, from coarse and strong to fine and faint.
"""

from __future__ import annotations

import io

import numpy as np
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
