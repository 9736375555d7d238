"""Generates video clips for checks and tests, without shipping recordings."""

from __future__ import annotations

import io
from functools import lru_cache

import av
import numpy as np

from medialane.testing.sample_images import sample_pixels

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
