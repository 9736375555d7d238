"""The media of one request, in the form for each stage that the request needs."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any

import msgspec

from medialane.arena import describe
from medialane.core.errors import HandoverFailed, MedialaneError
from medialane.core.feature import Feature, FoundItem, MediaPrompt, StagedItem
from medialane.core.media import MediaRef, MediaSize
from medialane.core.stage import BEST_STAGE, STAGES, StageName
from medialane.core.tasks import gather_or_cancel
from medialane.core.tensor import TensorSpec
from medialane.gateway.assembly import Assembly
from medialane.gateway.feature_source import FeatureSource
from medialane.gateway.image_budget import ImageBudget
from medialane.gateway.scope import RequestScope
from medialane.observability.timeline import StageTimeline

logger = logging.getLogger(__name__)


class RequestMedia:
    """The items of one prompt (a `core.feature.StagedMedia`). The request's scope owns all their leases."""

    def __init__(
        self,
        source: MediaPrompt,
        features: FeatureSource,
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
        self._found: dict[StageName, tuple[StagedItem, ...]] = {}

    async def in_stage(self, stage: StageName) -> tuple[StagedItem, ...]:
        """Return the items in the form for `stage`. A URL's content may differ between stages: each item is identified
        by the content that is sent. Raises PromptTooLong as soon as the headers of images tell."""
        if (found := self._found.get(stage)) is None:
            found = self._found[stage] = await self._find(stage)
        return found

    async def without_embeddings(self) -> int:
        self.encoder, num_embeddings = "", 0
        for stage, found in list(self._found.items()):
            if not (num_found := sum(item.feature.embedding is not None for item in found)):
                continue
            anew = await self._find(stage)
            if any(old.feature.mm_hash != new.feature.mm_hash for old, new in zip(found, anew, strict=True)):
                raise HandoverFailed("the content of a URL has changed")
            self._found[stage] = anew
            num_embeddings += num_found
        return num_embeddings

    async def with_embeddings(self, mm_hashes: Collection[str]) -> tuple[Feature, ...]:
        items = await self.in_stage(BEST_STAGE)
        found = await gather_or_cancel([self._encoded(item, mm_hashes) for item in items])
        self._found[BEST_STAGE] = found
        return tuple(item.feature for item in found)

    def note_embedded(self, mm_hashes: Collection[str]) -> None:
        for item in (item for found in self._found.values() for item in found):
            if item.feature.mm_hash in mm_hashes and item.feature.embedding is None:
                self.features.forget(item.hold)

    @property
    def is_lost(self) -> bool:
        entries = [item.feature.entry for found in self._found.values() for item in found]
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
            found = await self.features.processed(ref, options, StageTimeline(), budget, encoder=self.encoder)
        except MedialaneError as error:
            logger.info("the embedding of an item is not found: %s", error.message)
            return item
        self.scope.take(found.hold)
        if found.value.embedding is None or found.value.mm_hash != item.feature.mm_hash:
            return item
        return dataclasses.replace(item, feature=found.value, hold=found.hold)

    async def _find(self, stage: StageName) -> tuple[StagedItem, ...]:
        find, budget = FINDERS[STAGES[stage].sends], ImageBudget(self._assembly, self.source.options)
        for ref in self.source.items:
            await self.features.count_sent(ref, budget)
        return await gather_or_cancel([find(self, ref, budget) for ref in self.source.items])


async def _processed(request: RequestMedia, ref: MediaRef, budget: ImageBudget) -> StagedItem:
    features, timeline = request.features, request.scope.timeline
    found = await features.processed(ref, request.source.options, timeline, budget, encoder=request.encoder)
    request.scope.take(found.hold)
    await _count_hit(ref, found, budget)
    timeline.num_embeddings += found.value.embedding is not None
    return StagedItem(ref, found.value, found.hold, is_hit=found.is_hit, content_hash=found.content_hash)


async def _decoded(request: RequestMedia, ref: MediaRef, budget: ImageBudget) -> StagedItem:
    found = await request.features.decoded(ref, request.scope.timeline, budget)
    request.scope.take(found.hold)
    await _count_hit(ref, found, budget)
    key = request.features.key(ref, request.source.options, content=found.content_hash)
    feature = msgspec.structs.replace(found.value, mm_hash=key)
    return StagedItem(ref, feature, found.hold, is_hit=found.is_hit)


async def _encoded(request: RequestMedia, ref: MediaRef, budget: ImageBudget) -> StagedItem:
    found = await request.features.encoded(ref, request.scope.timeline, budget)
    request.scope.take(found.hold)
    encoded = found.value
    key = request.features.key(ref, request.source.options, content=found.content_hash)
    tensors = describe(encoded.range, (TensorSpec("uint8", (encoded.num_bytes,)),))
    feature = Feature(ref.modality, key, b"", tensors, MediaSize())
    return StagedItem(ref, feature, found.hold, media_type=encoded.media_type)


async def _count_hit(ref: MediaRef, found: FoundItem[Feature], budget: ImageBudget) -> None:
    """Count a cached image; others have been counted before they were prepared."""
    if found.is_hit and ref.modality == "image":
        await budget.add(ref, found.value.size.width, found.value.size.height)


#: Functions that look up or prepare an item, by what its stage sends.
FINDERS: Mapping[str, Callable[[RequestMedia, MediaRef, ImageBudget], Coroutine[Any, Any, StagedItem]]] = {
    "processed": _processed,
    "decoded": _decoded,
    "encoded": _encoded,
}
