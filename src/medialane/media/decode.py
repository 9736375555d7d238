"""Encoded bytes to decoded media of any modality. Runs inside a preparer: synchronously, in one thread."""

from __future__ import annotations

from medialane.core.media import Decoded, Modality
from medialane.media.audio import decode_audio
from medialane.media.config import MediaConfig
from medialane.media.image import decode_image
from medialane.media.jpeg_scale import SizeChooser
from medialane.media.sampling import FrameSampler

# PyAV may be absent: pictures need none of it, and `sniff` refuses video then. It loads here, before preparers are
# forked, so that all share its pages.
try:
    from medialane.media.video import open_video
except ImportError as missing:
    if (missing.name or "").partition(".")[0] != "av":
        raise


def decode(
    data: memoryview,
    modality: Modality,
    media_type: str,
    io: bytes,
    config: MediaConfig,
    sampler: FrameSampler,
    chooser: SizeChooser | None = None,
) -> Decoded:
    """Decode one item; `media_type` is what `sniff` said, `chooser` as in `decode_image`. Raises what the modality's
    decoder raises."""
    if modality == "image":
        return decode_image(data, config, chooser)
    if modality == "audio":
        return decode_audio(data, config)
    with open_video(data, media_type, config) as video:
        return sampler.sample(video, io)
