"""Generates audio clips for demos, checks and tests, without shipping recordings."""

from __future__ import annotations

import io
from functools import lru_cache

import numpy as np
import soundfile


@lru_cache(maxsize=256)
def sample_audio(
    pitch_hz: float, seconds: float = 1.5, *, rate: int = 16000, container: str = "WAV", channels: int = 1
) -> bytes:
    """Return a tone with two overtones that swells and fades: unlike that of noise, its spectrum varies.

    `container` is a format of libsndfile. With several channels, each is fainter than the one before. Equal arguments
    give equal bytes.
    """
    time = np.arange(int(seconds * rate)) / rate
    wave = sum(np.sin(2 * np.pi * pitch_hz * k * time) / k for k in (1, 2, 3)) * 0.3 * np.sin(np.pi * time / seconds)
    samples = np.stack([wave / (1 + number) for number in range(channels)], axis=1).astype(np.float32)
    out = io.BytesIO()
    soundfile.write(out, samples, rate, format=container)
    return out.getvalue()
