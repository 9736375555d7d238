"""Media as data, made by code: clips and tones, of which equal arguments give equal bytes."""

from __future__ import annotations

import io
from functools import cache

import av
import numpy as np
import soundfile

from medialane.cli.sample_images import sample_pixels


@cache
def clip(seed: int, width: int = 224, height: int = 168, *, frames: int = 24, fps: int = 12) -> bytes:
    """An MP4 (H.264) that moves over a photo-like picture."""
    picture = sample_pixels(seed, width + frames * 4, height)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=fps, options={"threads": "1"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(frames):
            shown = np.ascontiguousarray(picture[:, number * 4 : number * 4 + width])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(shown, format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()


@cache
def tone(pitch_hz: float, seconds: float = 1.5, *, rate: int = 16000, kind: str = "WAV") -> bytes:
    """A tone with two overtones that swells and fades. Noise would do worse: its spectrum is always the same."""
    time = np.arange(int(seconds * rate)) / rate
    wave = sum(np.sin(2 * np.pi * pitch_hz * k * time) / k for k in (1, 2, 3))
    buffer = io.BytesIO()
    soundfile.write(buffer, (wave * 0.3 * np.sin(np.pi * time / seconds)).astype(np.float32), rate, format=kind)
    return buffer.getvalue()
