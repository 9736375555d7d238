"""Decodes items of any modality, or checks only their headers.

Runs inside a preparer: synchronously, in one thread, with a memory limit and a deadline.
"""

from __future__ import annotations

import msgspec

from medialane.core.media import AudioIo, Decoded, Modality
from medialane.media.audio import check_audio, decode_audio
from medialane.media.config import MediaConfig
from medialane.media.image import check_image, decode_image
from medialane.media.model_choices import FrameSampler
from medialane.media.published_image import PIXMAP_TYPE, decode_pixmap

# PyAV is optional: images do not need it, and without it `sniff` rejects video. Imported here, before preparers are
# forked, so that all share its pages.
try:
    from medialane.media.video import open_video
except ImportError as missing:
    if (missing.name or "").partition(".")[0] != "av":
        raise


def decode(
    data: memoryview,
    modality: Modality,
    *,
    media_type: str,
    io: bytes,
    config: MediaConfig,
    sampler: FrameSampler,
) -> Decoded:
    """Decode one item; `media_type` is the result of `sniff`.

    Raises what the modality's decoder raises.
    """
    if media_type == PIXMAP_TYPE:
        return decode_pixmap(data)
    if modality == "image":
        return decode_image(data, config)
    if modality == "audio":
        return decode_audio(data, config, sample_rate=msgspec.json.decode(io, type=AudioIo).sample_rate)
    with open_video(data, media_type, config) as video:
        return sampler.sample(video, io)


def probe(data: memoryview, modality: Modality, media_type: str, config: MediaConfig) -> None:
    """Raise what `decode` would raise for the item's header, without decoding it.

    In stage `url` the worker's vLLM decodes, with different limits or none, so a preparer opens the item first.
    `decode` includes these checks.
    """
    if modality == "image":
        check_image(data, config)
    elif modality == "audio":
        check_audio(data, config)
    else:
        with open_video(data, media_type, config):
            pass
