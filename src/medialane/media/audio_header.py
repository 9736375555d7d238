"""What an encoded sound is, told from its first bytes."""

from __future__ import annotations

from medialane.core.errors import UnsupportedMediaType
from medialane.media.config import MediaConfig


def sniff_audio(data: bytes | bytearray | memoryview, config: MediaConfig) -> str:
    """Raises UnsupportedMediaType."""
    raise UnsupportedMediaType("this gateway does not take audio yet")
