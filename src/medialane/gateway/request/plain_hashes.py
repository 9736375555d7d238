"""The hashes of plain vLLM for the items of prompts (`medialane render`)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from medialane.gateway.request.media import RequestMedia
from medialane.gateway.request.store_features import StoreFeatures
from medialane.media import MediaConfig, sniff_image
from medialane.media.data_url import PIXMAP_TYPE
from medialane.runtime.tasks import LoopFairness, gather_or_cancel
from medialane.types.errors import InvalidRequest
from medialane.types.feature import MediaPrompt, PreparedPrompt
from medialane.types.hashing import Bytes, DecodedItem, EncodedItem, HashedItem, MediaHasher
from medialane.types.media import DECODED, MediaRef, MediaSize
from medialane.types.media_lease import is_leased


class PlainHashes:
    """Computes hashes by `hasher`: of encoded bytes where they are, in the request's body or in the arena; of decoded
    media in a thread of its own, which ends with `close`."""

    def __init__(
        self, hasher: MediaHasher, features: StoreFeatures, *, fairness: LoopFairness, media: MediaConfig
    ) -> None:
        self._hasher = hasher
        self._features = features
        self._fairness = fairness
        self._media = media
        self._executor = ThreadPoolExecutor(1, "media-hash")

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def fetched(self, media: RequestMedia) -> tuple[MediaPrompt, dict[str, memoryview]]:
        """Return the prompt with the contents of its URLs, and the bytes of these by content hash, which the request's
        scope holds. Raises MedialaneError."""
        prompt = media.source
        if any(ref.is_embeds for ref in prompt.items):
            raise InvalidRequest("the hashes of embeddings are not known without an engine", param="messages")
        urls = [number for number, ref in enumerate(prompt.items) if ref.url is not None]
        if not urls:
            return prompt, {}
        items, fetched = list(prompt.items), {}
        of_urls = media.of([items[number] for number in urls])
        for number, item in zip(urls, await of_urls.in_stage("url"), strict=True):
            content = item.content_hash or ""
            (fetched[content],) = self._features.tensors(item.feature)
            # Those of leased media are found by their lease.
            url = items[number].url if is_leased(items[number].url) else None
            items[number] = msgspec.structs.replace(items[number], url=url, content=content, media_type=item.media_type)
        return msgspec.structs.replace(prompt, items=tuple(items)), fetched

    async def named(
        self, prepared: PreparedPrompt, media: RequestMedia, fetched: dict[str, memoryview]
    ) -> PreparedPrompt:
        """Return the prompt with the hashes of plain vLLM; not `is_predicted` if an item had to be decoded for them.
        Raises MedialaneError."""
        prompt = prepared.source
        sizes = [placed.feature.size for placed in prepared.features] or [MediaSize()] * len(prompt.items)
        known = [self._known(ref, size, fetched) for ref, size in zip(prompt.items, sizes, strict=True)]
        items: Sequence[HashedItem] = known
        if not all(map(self._is_hashed, known)):
            items = await gather_or_cancel([self._item(each, media) for each in known])

        def hashes() -> tuple[str, ...]:
            return tuple(self._hasher.hashes(prompt, items))

        if is_decoded := any(isinstance(item, DecodedItem) for item in items):
            mm_hashes = await asyncio.get_running_loop().run_in_executor(self._executor, hashes)
        else:
            num_bytes = sum(len(item.data) for item in items if isinstance(item, EncodedItem))
            mm_hashes = await self._fairness.run(num_bytes, hashes)
        is_predicted = prepared.is_predicted and not is_decoded
        return msgspec.structs.replace(prepared, mm_hashes=mm_hashes, is_predicted=is_predicted)

    def _known(self, ref: MediaRef, size: MediaSize, fetched: dict[str, memoryview]) -> MediaRef | EncodedItem:
        """Return the item as it is known without decoding it."""
        if ref.alias is not None:  # the hash follows from the client's `uuid`
            return ref
        data: Bytes = fetched[ref.content or ""] if ref.data is None else ref.data
        return EncodedItem(ref, data, size, ref.modality != "image" or self._is_rgb(ref, data))

    def _is_hashed(self, item: MediaRef | EncodedItem) -> bool:
        """Whether vLLM hashes the item without what is decoded from it."""
        return isinstance(item, MediaRef) or not self._hasher.needs_decoding(item)

    async def _item(self, item: MediaRef | EncodedItem, media: RequestMedia) -> HashedItem:
        if isinstance(item, MediaRef) or self._is_hashed(item):
            return item
        (decoded,) = await media.of([item.ref]).in_stage("decoded")
        (array,) = self._features.tensors(decoded.feature)
        return DecodedItem(item.ref, item.data, DECODED[item.ref.modality].over(array, decoded.feature.size))

    def _is_rgb(self, ref: MediaRef, data: Bytes) -> bool:
        return ref.media_type == PIXMAP_TYPE or sniff_image(data, self._media).is_rgb
