"""Hosts of a simulated cluster: the media path of each, and the transfer of media between them.

An entry (the pixels of an item, or its embedding) is sent to a host once: stores keep what they have copied. Transfers
from one host to another follow each other, as on one connection. Nothing is ever evicted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from medialane.types.feature import MediaSpan
from simulated_media import KeepsNothing, Media, MediaPath

#: One transfer of some items, and each MiB of it (1 GiB/s: a network of 10 Gbit/s).
TRANSFER_MS, TRANSFER_MS_PER_MIB = 0.5, 1.0
#: The pixels of an item for each of its embeddings, as uint8: 4 patches of 14x14 pixels in 3 colours and 2 frames.
PIXEL_BYTES = 4 * 1176
_MIB = 1 << 20


class Host:
    def __init__(self, media: MediaPath | None = None) -> None:
        self.media: MediaPath = media or KeepsNothing()
        self._pixels: set[str] = set()
        self._free_s: dict[Host, float] = {}

    def prepared(self, media: Media) -> None:
        """A gateway here has these items."""
        self._pixels |= {span.mm_hash for span in media if not span.embedding_bytes}

    def hand_over(self, media: Media, other: Host, deliver: Callable[[], None]) -> None:
        """Call `deliver` when `other` has the items: now if it is this host, or has them."""
        missing = {span.mm_hash: num_bytes(span) for span in media if not other.has(span)} if other is not self else {}
        if not missing:
            deliver()
            return
        loop = asyncio.get_running_loop()
        begin_s = max(loop.time(), self._free_s.get(other, 0.0))
        end_s = begin_s + 1e-3 * (TRANSFER_MS + TRANSFER_MS_PER_MIB * sum(missing.values()) / _MIB)
        self._free_s[other] = end_s
        loop.call_at(end_s, other._received, media, deliver)

    def has(self, span: MediaSpan) -> bool:
        return self.media.has_embedding(span.mm_hash) if span.embedding_bytes else span.mm_hash in self._pixels

    def _received(self, media: Media, deliver: Callable[[], None]) -> None:
        self.prepared(media)
        self.media.received({span.mm_hash for span in media if span.embedding_bytes})
        deliver()


def num_bytes(span: MediaSpan) -> int:
    """Return the size of the item as it is handed over."""
    return span.embedding_bytes or span.num_embeds * PIXEL_BYTES
