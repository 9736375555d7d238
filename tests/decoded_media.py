"""One item, decoded as in a preparer, through the door of `media`. Files are not sniffed: a decoder gets all bytes."""

import json

from medialane.media import PIXMAP_TYPE, MediaConfig, decode, measure, probe, sniff
from medialane.types.media import Decoded, FrameSampler, MediaSize, Modality


def _decode(data, modality: Modality, config: MediaConfig, media_type="", io=None, sampler: FrameSampler | None = None):
    io = json.dumps(io or {}).encode()
    return decode(memoryview(data), modality, media_type=media_type, io=io, config=config, sampler=sampler)


def decode_image(data, config: MediaConfig) -> Decoded:
    return _decode(data, "image", config)


def decode_pixmap(data) -> Decoded:
    return _decode(data, "image", MediaConfig(), PIXMAP_TYPE)


def check_image(data, config: MediaConfig) -> None:
    probe(memoryview(data), "image", "", config)


def measure_image(data, config: MediaConfig) -> MediaSize:
    return measure(memoryview(data), "image", media_type="", io=b"{}", config=config, sampler=None)


def decode_audio(data, config: MediaConfig, *, sample_rate: int = 0) -> Decoded:
    return _decode(data, "audio", config, io={"sample_rate": sample_rate})


def decode_video(data, config: MediaConfig, sampler: FrameSampler, io: dict) -> Decoded:
    return _decode(data, "video", config, sniff(data, "video", config), io, sampler)
