"""Small video clips, made with PyAV."""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from io import BytesIO

import av
import numpy as np
from PIL import Image

#: The image of a frame, by index, width and height.
Draw = Callable[[int, int, int], np.ndarray]

#: Encoder output is discarded: x265 and SVT-AV1 write to the process's stderr.
_QUIET = {"libx265": {"x265-params": "log-level=none:pools=none"}, "libsvtav1": {"preset": "12"}}

_FAST = {"libx264": {"preset": "ultrafast"}, "libx265": {"preset": "ultrafast"}, "libvpx-vp9": {"deadline": "realtime"}}


def pixels(index: int, width: int, height: int) -> np.ndarray:
    """An identifiable frame: a moving gradient with a block of the frame's own colour."""
    y, x = np.mgrid[0:height, 0:width]
    frame = np.stack([x * 2 + index * 5, y * 3 - index * 2, x + y + index * 11], axis=-1).astype(np.uint8)
    frame[: height // 3, : width // 3] = (index * 37 % 256, index * 101 % 256, index * 17 % 256)
    return frame


def clip(
    num_frames: int = 30,
    *,
    draw: Draw = pixels,
    codec: str = "libx264",
    container: str = "mp4",
    fps: Fraction | int = 25,
    size: tuple[int, int] = (64, 48),
    gop: int = 10,
    b_frames: int = 0,
    pix_fmt: str = "yuv420p",
    rotation: int = 0,
    options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
    pts: list[int] | None = None,
    ticks: int | None = None,
) -> bytes:
    """An encoded clip; equal arguments give equal bytes.

    `pts` are the frames' times in `ticks` a second; by default they follow at `fps`.
    """
    time_base = Fraction(1, ticks or 1)
    out = BytesIO()
    with _same_scheduling(), av.open(out, "w", format=container, container_options=container_options or {}) as file:
        chosen = {**_FAST.get(codec, {}), **_QUIET.get(codec, {}), **(options or {})}
        stream = file.add_stream(codec, rate=fps, options=chosen)
        stream.width, stream.height = size
        stream.pix_fmt = pix_fmt
        context = stream.codec_context
        context.gop_size = gop
        context.max_b_frames = b_frames
        context.thread_count = 1
        if ticks:
            context.time_base = time_base
        if rotation:
            stream.set_display_rotation(rotation)
        for index in range(num_frames):
            frame = av.VideoFrame.from_ndarray(draw(index, *size), format="rgb24").reformat(format=pix_fmt)
            frame.pts = index if pts is None else pts[index]
            frame.time_base = time_base if ticks else 1 / Fraction(fps)
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return out.getvalue()


@contextmanager
def _same_scheduling() -> Iterator[None]:
    """As root, SVT-AV1 gives its threads and the calling one a real-time priority (SCHED_FIFO, 99). If the calling one
    kept it, every process that later tests start would inherit it, and two that poll stop a machine of two cores."""
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameters)


def remux(data: bytes, *, shift: int = 0, container: str = "mp4", drop: int = 0, **options: str) -> bytes:
    """The same packets, `shift` frames later, without the first `drop` ones.

    In MP4 a start before zero becomes an edit list that hides what is before it.
    """
    out = BytesIO()
    with av.open(BytesIO(data)) as source, av.open(out, "w", format=container, container_options=options) as file:
        stream = source.streams.video[0]
        ticks = shift * int(1 / stream.average_rate / stream.time_base)
        copy = file.add_stream_from_template(stream)
        for index, packet in enumerate(source.demux(stream)):
            if packet.dts is None or index < drop:
                continue
            packet.pts += ticks
            packet.dts += ticks
            packet.stream = copy
            file.mux(packet)
    return out.getvalue()


def broken(data: bytes, *, seed: int = 0, hits: int = 30) -> bytes:
    """The same file with some bytes of its middle changed."""
    changed = bytearray(data)
    for place in np.random.default_rng(seed).integers(len(data) // 4, len(data) * 3 // 4, hits):
        changed[place] ^= 0x55
    return bytes(changed)


def jpegs(num_frames: int, size: tuple[int, int] = (64, 48)) -> bytes:
    """vLLM's list of JPEG frames."""
    parts = []
    for index in range(num_frames):
        out = BytesIO()
        Image.fromarray(pixels(index, *size)).save(out, "JPEG")
        parts.append(b64encode(out.getvalue()))
    return b",".join(parts)
