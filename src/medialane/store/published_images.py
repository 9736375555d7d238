"""Reads images that clients have published for RDMA reads (`media.published_image`) into the arena.

NVIDIA Dynamo's `nixl_connect` is what they publish with: a readable operation, which ends with our notification. Its
owner may reuse the memory afterwards, so each is read at most once; later requests with the same URL use the cache.
"""

from __future__ import annotations

import asyncio
import logging

from cachetools import LRUCache

from medialane.arena import ENTRY_HEADER_BYTES, Arena
from medialane.core.errors import InvalidImage, MediaFetchFailed, MediaFetchTimeout, TransferFailed
from medialane.core.flight import SingleFlight
from medialane.core.hashing import content_hash
from medialane.core.media import MediaRef
from medialane.core.tensor import TensorDescriptor, TensorSpec
from medialane.media import Fetched, MediaConfig
from medialane.media.published_image import PIXMAP_HEADER_BYTES, PublishedImage, pixmap_header, read_published
from medialane.media.url_cache import url_key
from medialane.store.encoded_store import EncodedStore
from medialane.store.pulls import Pulls
from medialane.transfer import StillWriting
from medialane.transfer.nixl import NixlMover, RdmaMetadata

logger = logging.getLogger(__name__)

#: URLs that are remembered as read.
_MAX_URLS = 16_384


class PublishedImages:
    """`fetch` is like that of `media.Fetcher`, for published images."""

    def __init__(self, arena: Arena, pulls: Pulls, mover: NixlMover, config: MediaConfig) -> None:
        self._arena = arena
        self._pulls = pulls
        self._mover = mover
        self._config = config
        self._store = EncodedStore(arena, config)
        self._contents: LRUCache[bytes, str] = LRUCache(_MAX_URLS)  # empty: reading it has failed, or has not ended
        self._reading: SingleFlight[tuple[bytes, bool], str] = SingleFlight()

    async def fetch(self, ref: MediaRef, *, need_data: bool = False) -> Fetched:
        """Return the content hash of the pixels, which are stored. Raises MediaFetchFailed, MediaFetchTimeout,
        ArenaFull, and what `read_published` raises."""
        key = url_key(ref.url or "", ref.salt)
        known = self._contents.get(key)
        if known and not need_data:
            return Fetched(known, None)
        return Fetched(await self._reading.do((key, need_data), lambda: self._read(ref, key)), None)

    async def _read(self, ref: MediaRef, key: bytes) -> str:
        if key in self._contents:
            raise MediaFetchFailed("the published image has been read before, and is no longer cached: publish it anew")
        image = read_published(ref.url or "", self._config)
        metadata = _metadata(image)
        height, width, _ = image.shape
        reservation = self._arena.reserve(PIXMAP_HEADER_BYTES + image.num_bytes, "encoded")
        reservation.buffer[:PIXMAP_HEADER_BYTES] = pixmap_header(width, height)
        spec = TensorSpec("uint8", image.shape)
        pixels = TensorDescriptor(spec, reservation.range, ENTRY_HEADER_BYTES + PIXMAP_HEADER_BYTES)
        self._contents[key] = ""
        deadline_s = self._config.image_fetch_timeout_s
        try:
            await self._pulls.fill(
                reservation, lambda: self._mover.read_published(metadata, [pixels], deadline_s=deadline_s)
            )
        except StillWriting as error:
            raise MediaFetchTimeout("timeout while reading the published image") from error
        except TransferFailed as error:
            logger.warning("reading a published image failed: %s", error.message)
            raise MediaFetchFailed("the published image could not be read") from error
        with reservation:
            content = await asyncio.to_thread(content_hash, reservation.buffer)
            self._store.keep_pixmap(reservation, ref.salt, content)
        self._contents[key] = content
        return content


def _metadata(image: PublishedImage) -> RdmaMetadata:
    """Return the validated metadata of the client's agent. Raises InvalidImage."""
    try:
        found = RdmaMetadata.decode(bytes(image.rdma_metadata))
        found.agent_metadata()
    except TransferFailed as error:
        raise InvalidImage(error.message) from error
    if [descriptor.size for descriptor in found.descriptors] != [image.num_bytes]:
        raise InvalidImage(f"the RDMA metadata must have one descriptor of {image.num_bytes} bytes")
    return found
