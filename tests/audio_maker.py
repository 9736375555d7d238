"""Encoded audio clips for tests, by libsndfile, or by FFmpeg for containers that libsndfile does not support."""

from collections.abc import Callable, Mapping
from fractions import Fraction
from io import BytesIO

import av
import numpy as np
import soundfile

from medialane.testing.sample_media import sample_audio

LAYOUTS = {1: "mono", 2: "stereo", 6: "5.1", 8: "7.1"}


def tones(rate: int, channels: int = 1, seconds: float = 0.2) -> np.ndarray:
    """Tones with some noise: float32 of shape (samples, channels)."""
    rng = np.random.default_rng(channels)
    time = np.arange(int(rate * seconds))[:, None]
    tones = 0.3 * np.sin(time * np.linspace(0.01, 0.2, channels))
    return (tones + 0.1 * rng.standard_normal(tones.shape)).astype(np.float32)


def tone(pitch_hz: float, seconds: float = 1.5, *, rate: int = 16000, container: str = "WAV") -> bytes:
    return sample_audio(pitch_hz, seconds, rate=rate, container=container)


def by_libsndfile(samples: np.ndarray, rate: int, container: str = "WAV", coding: str | None = None) -> bytes:
    out = BytesIO()
    soundfile.write(out, samples, rate, format=container, subtype=coding)
    return out.getvalue()


def by_ffmpeg(samples: np.ndarray, rate: int, container: str, coding: str, video: str | None = None) -> bytes:
    layout = LAYOUTS[samples.shape[1]]
    out = BytesIO()
    with av.open(out, "w", format=container) as file:
        picture = file.add_stream(video, rate=10, width=64, height=48, pix_fmt="yuv420p") if video else None
        stream = file.add_stream(coding, rate=rate, layout=layout)
        for frame in _frames(samples, rate, layout, stream):
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
        if picture is not None:
            for _ in range(5):
                file.mux(picture.encode(av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8))))
            file.mux(picture.encode(None))
    return out.getvalue()


def _frames(samples, rate, layout, stream):
    whole = av.AudioFrame(format="flt", layout=layout, samples=len(samples))
    whole.planes[0].update(np.ascontiguousarray(samples).tobytes())
    whole.sample_rate, whole.pts = rate, 0
    context = stream.codec_context
    cutter = av.AudioResampler(context.format, layout, rate, frame_size=context.frame_size or 0)
    return [*cutter.resample(whole), *cutter.resample(None)]


def hours_of_silence(container: str, coding: str, rate: int, seconds: int) -> bytes:
    """One encoded frame of silence, repeated: a few bytes per second."""
    out = BytesIO()
    with av.open(out, "w", format=container) as file:
        stream = file.add_stream(coding, rate=rate, layout="mono")
        context = stream.codec_context
        context.open()
        frame = av.AudioFrame(format=context.format, layout="mono", samples=context.frame_size)
        frame.planes[0].update(bytes(frame.planes[0].buffer_size))
        frame.sample_rate, frame.pts = rate, 0
        silence = bytes([*stream.encode(frame), *stream.encode(None)][-1])
        for pts in range(0, rate * seconds, context.frame_size):
            packet = av.Packet(silence)
            packet.stream, packet.time_base = stream, Fraction(1, rate)
            packet.pts = packet.dts = pts
            packet.duration = context.frame_size
            file.mux(packet)
    return out.getvalue()


#: A small clip of every supported audio format.
FILES: Mapping[str, Callable[[], bytes]] = {
    "wav": lambda: by_libsndfile(tones(8000, 2), 8000),
    "flac": lambda: by_libsndfile(tones(8000, 2), 8000, "FLAC"),
    "mp3": lambda: by_libsndfile(tones(16000, 2), 16000, "MP3"),
    "vorbis": lambda: by_libsndfile(tones(16000, 2), 16000, "OGG", "VORBIS"),
    "opus": lambda: by_libsndfile(tones(16000, 2), 16000, "OGG", "OPUS"),
    "m4a": lambda: by_ffmpeg(tones(16000, 2), 16000, "ipod", "aac"),
    "webm": lambda: by_ffmpeg(tones(16000, 2), 16000, "webm", "libopus"),
    "video": lambda: by_ffmpeg(tones(16000, 2), 16000, "mp4", "aac", "mpeg4"),
}
