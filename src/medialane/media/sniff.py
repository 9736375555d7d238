"""What encoded bytes are, told from the bytes themselves, and whether a decoder may see them."""

from __future__ import annotations

from medialane.core.errors import UnsupportedMediaType
from medialane.core.media import Modality
from medialane.media.audio_header import sniff_audio
from medialane.media.config import MediaConfig
from medialane.media.foreign_types import HEAD_BYTES, invalid, is_foreign
from medialane.media.image_header import sniff_image
from medialane.media.kinds import check_modality, check_type
from medialane.media.video_header import sniff_video

Bytes = bytes | bytearray | memoryview


def sniff(data: Bytes, modality: Modality, config: MediaConfig) -> str:
    """The media type of one item, which is within the limits as far as its header tells; no decoder is run.

    Raises EmptyMedia, MediaTooLarge, UnsupportedMediaType, InvalidImage, InvalidVideo, InvalidAudio, ImageTooLarge.
    """
    check_modality(modality)
    try:
        media_type = _sniff(data, modality, config)
    except UnsupportedMediaType as error:
        if is_foreign(bytes(data[:HEAD_BYTES]), modality):
            raise
        raise invalid(modality, f"{error.message}, or it is damaged") from error
    check_type(modality, media_type)
    return media_type


def _sniff(data: Bytes, modality: Modality, config: MediaConfig) -> str:
    if modality == "image":
        return sniff_image(data, config).media_type
    if modality == "video":
        return sniff_video(data, config)
    return sniff_audio(data, config)
