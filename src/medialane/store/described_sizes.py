"""What is known of items from the size of their media: measured by preparers, and described by blanks of that size."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from cachetools import LRUCache

from medialane.arena import Lease
from medialane.prepare import Described, PreparerPool
from medialane.runtime.tasks import SingleFlight
from medialane.types.errors import ArenaFull, InvalidRequest
from medialane.types.hashing import decoded_key
from medialane.types.media import EncodedMedia, MediaRef, MediaSize, Modality

#: Bytes of the sizes, and of the descriptions, that are kept. A header has some hundred bytes, but may have 4 MiB; the
#: metadata of a long video have 6 KB.
MAX_BYTES = 16 * 1024 * 1024

#: Of an entry besides its header and metadata.
_ENTRY_BYTES = 512

#: Longer options are a client's, and are not kept.
_MAX_OPTIONS_BYTES = 256


class DescribedSizes:
    """Keeps what preparers have found, bounded in bytes; concurrent calls for the same are shared."""

    def __init__(self, pool: PreparerPool, lookup: Callable[[MediaRef, str], Lease[EncodedMedia] | None]) -> None:
        """`lookup` returns the cached bytes of this content; the caller owns the lease."""
        self._pool = pool
        self._lookup = lookup
        self._sizes: LRUCache[tuple[str, Modality], MediaSize] = LRUCache(MAX_BYTES, getsizeof=_size_bytes)
        self._described: LRUCache[object, Described | None] = LRUCache(MAX_BYTES, getsizeof=_described_bytes)
        self._measuring: SingleFlight[object, MediaSize] = SingleFlight()
        self._describing: SingleFlight[object, Described | None] = SingleFlight()

    def size(self, ref: MediaRef, content: str) -> MediaSize | None:
        """Return the size of `ref` as decoded, if it has been measured."""
        return self._sizes.get(_size_key(ref, content))

    async def measure(self, ref: MediaRef, encoded: Lease[EncodedMedia]) -> MediaSize:
        """As `PreparerPool.measure`; the caller keeps the lease."""
        content = encoded.value.content_hash
        key = _size_key(ref, content)
        size = await self._measuring.do(key, lambda: self._measure(ref, content))
        with suppress(ValueError):  # too large to be kept
            self._sizes[key] = size
        return size

    async def describe(self, modality: Modality, size: MediaSize, options: bytes) -> Described | None:
        """As `PreparerPool.describe_blank`; None also if the processor refuses a blank, so that processing the item
        says why it is refused, if it is."""
        key = modality, size, options
        if key in self._described:
            return self._described[key]
        described = await self._describing.do(key, lambda: self._describe(modality, size, options))
        if len(options) <= _MAX_OPTIONS_BYTES:
            with suppress(ValueError):
                self._described[key] = described
        return described

    async def _measure(self, ref: MediaRef, content: str) -> MediaSize:
        if (stored := self._lookup(ref, content)) is None:
            raise ArenaFull("the media were evicted before they were measured")
        with stored:
            return await self._pool.measure(stored, ref.io)

    async def _describe(self, modality: Modality, size: MediaSize, options: bytes) -> Described | None:
        try:
            return await self._pool.describe_blank(modality, size, options)
        except InvalidRequest:
            return None


def _size_key(ref: MediaRef, content: str) -> tuple[str, Modality]:
    return decoded_key(content=content, io=ref.io, salt=ref.salt), ref.modality


def _size_bytes(size: MediaSize) -> int:
    return _ENTRY_BYTES + len(size.metadata)


def _described_bytes(described: Described | None) -> int:
    return _ENTRY_BYTES if described is None else _size_bytes(described.size) + len(described.header)
