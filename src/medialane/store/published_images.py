"""Images that are published for RDMA reads (`media.data_url.PublishedImage`), by clients and by this store.

NVIDIA Dynamo's `nixl_connect` is the other end: a readable operation, which ends with the reader's notification. Its
owner may reuse the memory afterwards, so each is read at most once; later requests with the same URL use the cache.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec
from cachetools import LRUCache

from medialane.arena import ENTRY_HEADER_BYTES, Arena, Cached, Pin
from medialane.media import MediaConfig
from medialane.media.data_url import PIXMAP_HEADER_BYTES, PIXMAP_TYPE, PublishedImage, pixmap_header, read_published
from medialane.media.http_cache import url_key
from medialane.runtime.tasks import SingleFlight
from medialane.store.encoded_store import EncodedStore
from medialane.transfer.nixl.agent import RdmaMetadata
from medialane.transfer.nixl.mover import NixlMover, Published
from medialane.transfer.pulls import Pulls
from medialane.types.errors import (
    InvalidImage,
    InvalidRequest,
    MediaFetchFailed,
    MediaFetchTimeout,
    TransferFailed,
    TransferTimeout,
    Unavailable,
    UpstreamFailed,
)
from medialane.types.feature import Feature
from medialane.types.hashing import content_hash
from medialane.types.media import MediaRef
from medialane.types.tensor import ArenaRange, TensorDescriptor, TensorSpec

logger = logging.getLogger(__name__)

#: How long a published image is held for its reader.
HOLD_S = 60.0
_MAX_HELD = 256

#: URLs that are remembered as read.
_MAX_URLS = 16_384


class PublishedImages:
    """`fetch` is like `media.Fetcher`'s, for images that clients publish. Images that we publish are held for
    their readers for `hold_s`. The owner calls `close`."""

    def __init__(
        self, arena: Arena, pulls: Pulls, mover: NixlMover, config: MediaConfig, *, hold_s: float = HOLD_S
    ) -> None:
        self._arena = arena
        self._hold_s = hold_s
        self._pulls = pulls
        self._mover = mover
        self._config = config
        self._store = EncodedStore(arena, config)
        self._contents: LRUCache[bytes, str] = LRUCache(_MAX_URLS)  # empty: reading it has failed, or has not ended
        self._reading: SingleFlight[tuple[bytes, bool], str] = SingleFlight()
        self._holding: set[asyncio.Task[None]] = set()

    async def fetch(self, ref: MediaRef, *, need_data: bool = False) -> str:
        """Return the content hash of the pixels, which are stored. Raises MediaFetchFailed, MediaFetchTimeout,
        UpstreamFailed, ArenaFull, and what `read_published` raises."""
        key = url_key(ref.url or "", ref.salt)
        known = self._contents.get(key)
        if known and not need_data:
            return known
        return await self._reading.do((key, need_data), lambda: self._read(ref, key))

    async def publish(self, entry: ArenaRange) -> bytes:
        """Publish a decoded image, which the caller holds, and return its `PublishedImage` as JSON.

        The image is held until it has been read, and no longer than `hold_s`. Raises InvalidRequest for another entry,
        Unavailable.
        """
        if len(self._holding) >= _MAX_HELD:
            raise Unavailable("too many published images have not been read yet")
        if (pin := self._arena.share(entry)) is None:
            raise Unavailable("the image is no longer held")
        try:
            tensors = pin.value.tensors if isinstance(pin.value, Feature) else ()
            image = await self._publish(pin, tensors)
        except BaseException:  # cancellation included: the pin has no other owner
            pin.release()
            raise
        return image

    async def close(self) -> None:
        """Release the images that have not been read. Idempotent."""
        for task in self._holding:
            task.cancel()
        await asyncio.gather(*self._holding, return_exceptions=True)

    async def _publish(self, pin: Pin[Cached | None], tensors: Sequence[TensorDescriptor]) -> bytes:
        match [tensor.spec for tensor in tensors]:
            case [TensorSpec("uint8", (height, width, 3))]:
                pass
            case _:
                raise InvalidRequest("only decoded images can be published")
        try:
            published = await self._mover.publish(tensors)
        except TransferFailed as error:
            logger.warning("publishing an image failed: %s", error.message)
            raise Unavailable("images cannot be published at present") from error
        task = asyncio.get_running_loop().create_task(_is_read(published, self._hold_s), name="published image")
        self._holding.add(task)

        def end(_: object) -> None:  # also of a task that is cancelled before its first step
            self._holding.discard(task)
            published.completed.cancel()
            pin.release()

        task.add_done_callback(end)
        return msgspec.json.encode(PublishedImage(msgspec.Raw(published.metadata.encode()), (height, width, 3)))

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
        except TransferTimeout as error:
            raise MediaFetchTimeout("timeout while reading the published image") from error
        except TransferFailed as error:
            logger.warning("reading a published image failed: %s", error.message)
            raise UpstreamFailed("the published image could not be read") from error
        with reservation:
            content = await asyncio.to_thread(content_hash, reservation.buffer)
            self._store.publish(
                reservation, source="image", salt=ref.salt, content=content, media_type=PIXMAP_TYPE
            ).release()
        self._contents[key] = content
        return content


async def _is_read(published: Published, hold_s: float) -> None:
    """Return when the image has been read, cannot be any more, or has not been for `hold_s`."""
    try:
        async with asyncio.timeout(hold_s):
            await published.completed
    except TimeoutError:
        logger.warning("a published image was not read within %g s", hold_s)
    except TransferFailed as error:
        logger.warning("a published image cannot be read any more: %s", error.message)


def _metadata(image: PublishedImage) -> RdmaMetadata:
    """Return the validated metadata of the client's agent. Raises InvalidImage."""
    try:
        metadata = RdmaMetadata.decode(bytes(image.rdma_metadata))
        metadata.agent_metadata()
    except TransferFailed as error:
        raise InvalidImage(error.message) from error
    if [descriptor.size for descriptor in metadata.descriptors] != [image.num_bytes]:
        raise InvalidImage(f"the RDMA metadata must have one descriptor of {image.num_bytes} bytes")
    return metadata
