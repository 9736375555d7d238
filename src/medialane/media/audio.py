"""Encoded sound to samples."""

from __future__ import annotations

from medialane.core.errors import UnsupportedMediaType
from medialane.core.media import AudioSamples
from medialane.media.config import MediaConfig


def decode_audio(data: memoryview, config: MediaConfig) -> AudioSamples:
    """Raises UnsupportedMediaType."""
    raise UnsupportedMediaType("this gateway does not take audio yet")
