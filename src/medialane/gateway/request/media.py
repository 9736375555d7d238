"""The media of one request, in the form for each stage that it needs; and what plain vLLM would call them."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import msgspec

from medialane.gateway.request.assembly import Assembly, ImageBudget
from medialane.gateway.request.scope import RequestScope
from medialane.gateway.request.store_items import StoreItems
from medialane.media import MediaConfig, sniff_image
from medialane.media.data_url import PIXMAP_TYPE
from medialane.observability.timeline import RequestTimeline
from medialane.runtime.tasks import LoopFairness, gather_or_cancel
from medialane.store.messages import Form
from medialane.types.errors import HandoverFailed, InvalidRequest, MedialaneError
from medialane.types.feature import Feature, MediaPrompt, PreparedPrompt, StagedItem
from medialane.types.hashing import Bytes, DecodedItem, EncodedItem, HashedItem, MediaHasher
from medialane.types.media import BEST_STAGE, DECODED, STAGES, MediaRef, MediaSize, StageName
from medialane.types.media_lease import is_leased

logger = logging.getLogger(__name__)


class RequestMedia:
    """The items of one prompt (implements `types.feature.StagedMedia`). The request's scope owns all their holds."""

    def __init__(
        self,
        source: MediaPrompt,
        store_items: StoreItems,
        scope: RequestScope,
        assembly: Assembly,
        *,
        encoder: str = "",
    ) -> None:
        """Embeddings of the `encoder` with this digest are used instead of tensors."""
        self.encoder = encoder
        self.source = source
        self._assembly = assembly
        self.store_items = store_items
        self.scope = scope
        self._items: dict[StageName, tuple[StagedItem, ...]] = {}

    async def in_stage(self, stage: StageName) -> tuple[StagedItem, ...]:
        """Return the items in the form for `stage`. A URL's content may differ between stages: each item is identified
        by the content that is sent. Raises PromptTooLong once image headers show that the prompt is too long."""
        if (items := self._items.get(stage)) is None:
            items = self._items[stage] = await self._find(stage)
        return items

    async def described(self) -> tuple[StagedItem, ...]:
        """Return the items as in the stage of features, but without tensors where their headers are known from the size
        of their media: then `is_hit` is None. Raises like `in_stage`."""
        budget = self._budget()
        return await gather_or_cancel([self._described(ref, budget) for ref in self.source.items])

    def have(self, stage: StageName, items: Sequence[StagedItem]) -> None:
        """Use these items, which have been found, in a stage."""
        self._items[stage] = tuple(items)

    def of(self, items: Sequence[MediaRef]) -> RequestMedia:
        """Return some items of the prompt as media of their own."""
        source = msgspec.structs.replace(self.source, items=tuple(items))
        return RequestMedia(source, self.store_items, self.scope, self._assembly)

    async def without_embeddings(self) -> int:
        self.encoder, num_embeddings = "", 0
        for stage, items in list(self._items.items()):
            if not (num_embedded := sum(item.feature.embedding is not None for item in items)):
                continue
            anew = await self._find(stage)
            if any(old.feature.mm_hash != new.feature.mm_hash for old, new in zip(items, anew, strict=True)):
                raise HandoverFailed("the content of a URL has changed")
            self._items[stage] = anew
            num_embeddings += num_embedded
        return num_embeddings

    async def with_embeddings(self, mm_hashes: Collection[str]) -> tuple[Feature, ...]:
        items = await self.in_stage(BEST_STAGE)
        embedded = await gather_or_cancel([self._embedded(item, mm_hashes) for item in items])
        self._items[BEST_STAGE] = embedded
        return tuple(item.feature for item in embedded)

    def note_embedded(self, mm_hashes: Collection[str]) -> None:
        for item in chain.from_iterable(self._items.values()):
            if item.feature.mm_hash in mm_hashes and item.feature.embedding is None:
                self.store_items.forget(item.hold)

    @property
    def is_lost(self) -> bool:
        entries = [item.feature.entry for item in chain.from_iterable(self._items.values())]
        return any(entry is not None and entry.arena != self.store_items.arena for entry in entries)

    async def _embedded(self, item: StagedItem, mm_hashes: Collection[str]) -> StagedItem:
        """Return the item with its embedding, if it is one of these and is found."""
        if item.feature.embedding is not None or item.feature.mm_hash not in mm_hashes or not self.encoder:
            return item
        # By content: the URL is not fetched again, and data are not hashed again.
        ref = msgspec.structs.replace(item.ref, url=None, data=None, alias=None, content=item.content_hash)
        options, budget = self.source.options, ImageBudget(self._assembly, self.source.options)
        self.store_items.forget(item.hold)
        try:
            found = await self.store_items.processed(ref, options, RequestTimeline(), budget, encoder=self.encoder)
        except MedialaneError as error:
            logger.info("the embedding of an item is not found: %s", error.message)
            return item
        if found.hold is not None:
            self.scope.defer(found.hold.release)
        if found.feature.embedding is None or found.feature.mm_hash != item.feature.mm_hash:
            return item
        return dataclasses.replace(item, feature=found.feature, hold=found.hold)

    async def _find(self, stage: StageName) -> tuple[StagedItem, ...]:
        sends, budget = STAGES[stage].sends, self._budget()
        for ref in self.source.items:
            await self.store_items.count_sent(ref, budget)
        held = await self.store_items.hold_cached(self.source.items, sends, self.source.options, encoder=self.encoder)
        try:
            return await gather_or_cancel([self._found(sends, ref, budget) for ref in self.source.items])
        finally:
            for hold in held:
                hold.release()

    async def _found(self, sends: Form, ref: MediaRef, budget: ImageBudget) -> StagedItem:
        """Look up an item, or have it prepared, in the form that a stage sends."""
        store_items, options = self.store_items, self.source.options
        with self.scope.record.finding(ref) as timeline:
            if sends == "processed":
                item = await store_items.processed(ref, options, timeline, budget, encoder=self.encoder)
            elif sends == "decoded":
                item = await store_items.decoded(ref, options, timeline, budget)
            else:
                item = await store_items.encoded(ref, options, timeline, budget)
        keep(item, self.scope)
        if item.is_hit and ref.modality == "image":  # others have been counted before they were prepared
            await budget.add(ref, item.feature.size.width, item.feature.size.height)
        return item

    async def _described(self, ref: MediaRef, budget: ImageBudget) -> StagedItem:
        with self.scope.record.finding(ref) as timeline:
            described = await self.store_items.described(ref, self.source.options, timeline, budget)
        return described or await self._found("processed", ref, budget)

    def _budget(self) -> ImageBudget:
        return ImageBudget(self._assembly, self.source.options, self.scope.preparation)


def keep(item: StagedItem, scope: RequestScope) -> None:
    """Hold the item until the request ends, and count its embedding."""
    if item.hold is not None:
        scope.defer(item.hold.release)
    scope.timeline.num_embeddings += item.feature.embedding is not None


class PlainHashes:
    """The hashes of plain vLLM for the items of prompts (`medialane render`), computed by `hasher`: of encoded bytes
    where they are, in the request's body or in the arena; of decoded media in a thread of its own, which ends with
    `close`."""

    def __init__(
        self, hasher: MediaHasher, store_items: StoreItems, *, fairness: LoopFairness, media: MediaConfig
    ) -> None:
        self._hasher = hasher
        self._store_items = store_items
        self._fairness = fairness
        self._media = media
        self._executor = ThreadPoolExecutor(1, "media-hash")

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def fetched(self, media: RequestMedia) -> tuple[MediaPrompt, dict[str, memoryview]]:
        """Return the prompt with the contents of its URLs, and the bytes of these by their names, which the request's
        scope holds; of pages of documents, image files. Raises MedialaneError."""
        prompt = media.source
        if any(ref.is_embeds for ref in prompt.items):
            raise InvalidRequest("the hashes of embeddings are not known without an engine", param="messages")
        urls = [number for number, ref in enumerate(prompt.items) if ref.url is not None or ref.page is not None]
        if not urls:
            return prompt, {}
        items, fetched = list(prompt.items), {}
        of_urls = media.of([items[number] for number in urls])
        for number, item in zip(urls, await of_urls.in_stage("url"), strict=True):
            content = item.content_hash or ""
            (data,) = self._store_items.tensors(item.feature)
            if items[number].page is not None:
                fetched[_name(items[number])] = data
                continue
            fetched[content] = data
            # Leased media are found by their lease.
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
        data: Bytes = fetched[_name(ref)] if ref.data is None or ref.page is not None else ref.data
        return EncodedItem(ref, data, size, ref.modality != "image" or self._is_rgb(ref, data))

    def _is_hashed(self, item: MediaRef | EncodedItem) -> bool:
        """Whether vLLM hashes the item without what is decoded from it."""
        return isinstance(item, MediaRef) or not self._hasher.needs_decoding(item)

    async def _item(self, item: MediaRef | EncodedItem, media: RequestMedia) -> HashedItem:
        if isinstance(item, MediaRef) or self._is_hashed(item):
            return item
        (decoded,) = await media.of([item.ref]).in_stage("decoded")
        (array,) = self._store_items.tensors(decoded.feature)
        return DecodedItem(item.ref, item.data, DECODED[item.ref.modality].over(array, decoded.feature.size))

    def _is_rgb(self, ref: MediaRef, data: Bytes) -> bool:
        return ref.media_type == PIXMAP_TYPE or sniff_image(data, self._media).is_rgb


def _name(ref: MediaRef) -> str:
    """Return the content hash of an item; of a page, what tells it from others of its document."""
    return ref.content or "" if ref.page is None else ref.io.decode()
