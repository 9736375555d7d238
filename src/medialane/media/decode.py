"""Encoded bytes to decoded media of any modality, or only as far as the file's header.

Runs inside a preparer: synchronously, in one thread, with a limit of memory and a deadline.
"""

from __future__ import annotations

from medialane.core.media import Decoded, Modality
from medialane.media.audio import check_audio, decode_audio
from medialane.media.config import MediaConfig
from medialane.media.image import check_image, decode_image
from medialane.media.model_choices import FrameSampler, SizeCheck, SizeChooser

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
    *,
    media_type: str,
    io: bytes,
    config: MediaConfig,
    sampler: FrameSampler,
    chooser: SizeChooser | None = None,
    check_size: SizeCheck | None = None,
) -> Decoded:
    """Decode one item; `media_type` is what `sniff` said, `chooser` and `check_size` as in `decode_image`. Raises what
    the modality's decoder raises."""
    if modality == "image":
        return decode_image(data, config, chooser, check_size)
    if modality == "audio":
        return decode_audio(data, config)
    with open_video(data, media_type, config) as video:
        return sampler.sample(video, io)


def probe(data: memoryview, modality: Modality, media_type: str, config: MediaConfig) -> None:
    """Raise what `decode` would raise for what the item says of itself, without decoding it.

    In stage `url` the worker's vLLM decodes, with other limits or none, so a preparer opens the item first. `decode`
    itself needs no probe before it.
    """
    if modality == "image":
        check_image(data, config)
    elif modality == "audio":
        check_audio(data, config)
    else:
        with open_video(data, media_type, config):
            pass
