"""What an encoded video is, told from its first bytes."""

from __future__ import annotations

from medialane.core.errors import UnsupportedMediaType
from medialane.media.config import MediaConfig


def sniff_video(data: bytes | bytearray | memoryview, config: MediaConfig) -> str:
    """Raises UnsupportedMediaType."""
    raise UnsupportedMediaType("this gateway does not take video yet")
