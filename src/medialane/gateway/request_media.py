"""The media of one request, in the form for each stage that the request needs."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec

from medialane.arena import describe
from medialane.core.feature import Feature, FoundItem, MediaPrompt, StagedItem
from medialane.core.media import MediaRef, MediaSize
from medialane.core.stage import STAGES, StageName
from medialane.core.tensor import TensorSpec
from medialane.gateway.assembly import Assembly
from medialane.gateway.feature_source import FeatureSource
from medialane.gateway.gather_or_cancel import gather_or_cancel
from medialane.gateway.image_budget import ImageBudget
from medialane.gateway.scope import RequestScope


class RequestMedia:
    """The items of one prompt (a `core.feature.StagedMedia`). The request's scope owns all their leases."""

    def __init__(self, source: MediaPrompt, features: FeatureSource, scope: RequestScope, assembly: Assembly) -> None:
        self.source = source
        self._assembly = assembly
        self.features = features
        self.scope = scope
        self._found: dict[StageName, tuple[StagedItem, ...]] = {}

    async def in_stage(self, stage: StageName) -> tuple[StagedItem, ...]:
        """Return the items in the form for `stage`. A URL's content may differ between stages: each item is identified
        by the content that is sent. Raises PromptTooLong as soon as the headers of images tell."""
        if (found := self._found.get(stage)) is None:
            find, budget = FINDERS[STAGES[stage].sends], ImageBudget(self._assembly, self.source.options)
            for ref in self.source.items:
                await self.features.count_sent(ref, budget)
            found = self._found[stage] = await gather_or_cancel([find(self, ref, budget) for ref in self.source.items])
        return found

    @property
    def is_lost(self) -> bool:
        tensors = [tensor for found in self._found.values() for item in found for tensor in item.feature.tensors]
        return any(tensor.range.arena != self.features.arena for tensor in tensors)


async def _processed(request: RequestMedia, ref: MediaRef, budget: ImageBudget) -> StagedItem:
    found = await request.features.processed(ref, request.source.options, request.scope.timeline, budget)
    request.scope.take(found.hold)
    await _count_hit(ref, found, budget)
    return StagedItem(ref, found.value, found.hold, is_hit=found.is_hit)


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
