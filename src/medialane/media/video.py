"""Encoded video to frames."""

from __future__ import annotations

from contextlib import AbstractContextManager

from medialane.core.errors import UnsupportedMediaType
from medialane.core.media import Video
from medialane.media.config import MediaConfig


def open_video(data: memoryview, media_type: str, config: MediaConfig) -> AbstractContextManager[Video]:
    """Raises UnsupportedMediaType."""
    raise UnsupportedMediaType("this gateway does not take video yet")
