"""In place of a processor where preparers process nothing: in stage `url`, and for a model of text alone.

Preparers still open what workers are about to decode (`media.probe`), which needs no engine: a fork server of this
factory starts at once, whatever the model.
"""

from __future__ import annotations

from collections.abc import Sequence

from medialane.core.errors import UnsupportedMediaType
from medialane.core.media import Decoded, FrameBatch, Video
from medialane.prepare.processor import ProcessedItem

#: As the pool takes it.
FACTORY = "medialane.prepare.no_processor:build_processor"

_REFUSAL = "this model takes no media"


def build_processor(_config: bytes) -> NoProcessor:
    """Factory."""
    return NoProcessor()


class NoProcessor:
    """Refuses every item (a `Processor`)."""

    def sample(self, video: Video, io: bytes) -> FrameBatch:
        raise UnsupportedMediaType(_REFUSAL)

    def process(self, media: Decoded, options: bytes) -> ProcessedItem:
        raise UnsupportedMediaType(_REFUSAL)

    def check_size(self, size: tuple[int, int], options: bytes) -> None:
        raise UnsupportedMediaType(_REFUSAL)

    def smaller_size(
        self, size: tuple[int, int], smaller: Sequence[tuple[int, int]], options: bytes
    ) -> tuple[int, int] | None:
        raise UnsupportedMediaType(_REFUSAL)
