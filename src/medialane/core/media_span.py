"""Where a media item stands in a prompt."""

from __future__ import annotations

import msgspec


class MediaSpan(msgspec.Struct, frozen=True):
    """Where a media item stands in a prompt: tokens [offset, offset + length), half-open.

    `num_embeds` is how many embeddings the encoder makes for it (its tokens less separators).
    """

    mm_hash: str
    offset: int
    length: int
    modality: str = "image"
    num_embeds: int = 0

    @property
    def end(self) -> int:
        return self.offset + self.length
