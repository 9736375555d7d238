"""The media of one request, in the form for each stage that it needs; and the features that its client names, or whose
tensors it sends.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec

from medialane.arena import describe
from medialane.gateway.request.assembly import Assembly, ImageBudget
from medialane.gateway.request.scope import RequestScope
from medialane.gateway.request.store_features import StoreFeatures
from medialane.observability.timeline import StageTimeline
from medialane.runtime.tasks import gather_or_cancel
from medialane.types.errors import HandoverFailed, MedialaneError
from medialane.types.feature import (
    Feature,
    FoundItem,
    MediaPrompt,
    StagedItem,
)
from medialane.types.media import MediaRef, MediaSize
from medialane.types.stage import BEST_STAGE, STAGES, StageName
from medialane.types.tensor import TensorSpec

logger = logging.getLogger(__name__)


class RequestMedia:
    """The items of one prompt (a `core.feature.StagedMedia`). The request's scope owns all their leases."""

    def __init__(
        self,
        source: MediaPrompt,
        features: StoreFeatures,
        scope: RequestScope,
        assembly: Assembly,
        *,
        encoder: str = "",
    ) -> None:
        """Embeddings of the `encoder` with this digest are used instead of tensors."""
        self.encoder = encoder
        self.source = source
        self._assembly = assembly
        self.features = features
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
        return await gather_or_cancel([_described(self, ref, budget) for ref in self.source.items])

    def have(self, stage: StageName, items: Sequence[StagedItem]) -> None:
        """Use these items, which have been found, in a stage."""
        self._items[stage] = tuple(items)

    def of(self, items: Sequence[MediaRef]) -> RequestMedia:
        """Return some items of the prompt as media of their own."""
        source = msgspec.structs.replace(self.source, items=tuple(items))
        return RequestMedia(source, self.features, self.scope, self._assembly)

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
        encoded = await gather_or_cancel([self._encoded(item, mm_hashes) for item in items])
        self._items[BEST_STAGE] = encoded
        return tuple(item.feature for item in encoded)

    def note_embedded(self, mm_hashes: Collection[str]) -> None:
        for item in chain.from_iterable(self._items.values()):
            if item.feature.mm_hash in mm_hashes and item.feature.embedding is None:
                self.features.forget(item.hold)

    @property
    def is_lost(self) -> bool:
        entries = [item.feature.entry for item in chain.from_iterable(self._items.values())]
        return any(entry is not None and entry.arena != self.features.arena for entry in entries)

    async def _encoded(self, item: StagedItem, mm_hashes: Collection[str]) -> StagedItem:
        """Return the item with its embedding, if it is one of these and is found."""
        if item.feature.embedding is not None or item.feature.mm_hash not in mm_hashes or not self.encoder:
            return item
        # By content: the URL is not fetched again, and data are not hashed again.
        ref = msgspec.structs.replace(item.ref, url=None, data=None, alias=None, content=item.content_hash)
        options, budget = self.source.options, ImageBudget(self._assembly, self.source.options)
        self.features.forget(item.hold)
        try:
            cached = await self.features.processed(ref, options, StageTimeline(), budget, encoder=self.encoder)
        except MedialaneError as error:
            logger.info("the embedding of an item is not found: %s", error.message)
            return item
        self.scope.defer(cached.hold.release)
        if cached.value.embedding is None or cached.value.mm_hash != item.feature.mm_hash:
            return item
        return dataclasses.replace(item, feature=cached.value, hold=cached.hold)

    async def _find(self, stage: StageName) -> tuple[StagedItem, ...]:
        find, budget = FINDERS[STAGES[stage].sends], self._budget()
        for ref in self.source.items:
            await self.features.count_sent(ref, budget)
        return await gather_or_cancel([find(self, ref, budget) for ref in self.source.items])

    def _budget(self) -> ImageBudget:
        return ImageBudget(self._assembly, self.source.options, self.scope.preparation)


async def _described(request: RequestMedia, ref: MediaRef, budget: ImageBudget) -> StagedItem:
    with request.scope.record.finding(ref) as timeline:
        described = await request.features.described(ref, request.source.options, timeline, budget)
    if described is None:
        return await _processed(request, ref, budget)
    content, feature = described
    return StagedItem(ref, feature, content_hash=content)


async def _processed(request: RequestMedia, ref: MediaRef, budget: ImageBudget) -> StagedItem:
    features, options = request.features, request.source.options
    with request.scope.record.finding(ref) as timeline:
        cached = await features.processed(ref, options, timeline, budget, encoder=request.encoder)
    request.scope.defer(cached.hold.release)
    await _count_hit(ref, cached, budget)
    request.scope.timeline.num_embeddings += cached.value.embedding is not None
    return StagedItem(ref, cached.value, cached.hold, is_hit=cached.is_hit, content_hash=cached.content_hash)


async def _decoded(request: RequestMedia, ref: MediaRef, budget: ImageBudget) -> StagedItem:
    with request.scope.record.finding(ref) as timeline:
        cached = await request.features.decoded(ref, timeline, budget)
    request.scope.defer(cached.hold.release)
    await _count_hit(ref, cached, budget)
    key = request.features.key(ref, request.source.options, content=cached.content_hash)
    feature = msgspec.structs.replace(cached.value, mm_hash=key)
    return StagedItem(ref, feature, cached.hold, is_hit=cached.is_hit)


async def _encoded(request: RequestMedia, ref: MediaRef, budget: ImageBudget) -> StagedItem:
    with request.scope.record.finding(ref) as timeline:
        cached = await request.features.encoded(ref, timeline, budget)
    request.scope.defer(cached.hold.release)
    encoded = cached.value
    key = request.features.key(ref, request.source.options, content=cached.content_hash)
    tensors = describe(encoded.range, (TensorSpec("uint8", (encoded.num_bytes,)),))
    feature = Feature(ref.modality, key, b"", tensors, MediaSize())
    return StagedItem(ref, feature, cached.hold, media_type=encoded.media_type, content_hash=cached.content_hash)


async def _count_hit(ref: MediaRef, item: FoundItem[Feature], budget: ImageBudget) -> None:
    """Count a cached image; others have been counted before they were prepared."""
    if item.is_hit and ref.modality == "image":
        await budget.add(ref, item.value.size.width, item.value.size.height)


#: Functions that look up or prepare an item, by what its stage sends.
FINDERS: Mapping[str, Callable[[RequestMedia, MediaRef, ImageBudget], Coroutine[Any, Any, StagedItem]]] = {
    "processed": _processed,
    "decoded": _decoded,
    "encoded": _encoded,
}
