"""The media of one request, in the form for each stage that the request needs."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec

from medialane.arena import describe
from medialane.core.feature import Feature, MediaPrompt, StagedItem
from medialane.core.media import MediaRef, MediaSize
from medialane.core.stage import STAGES, StageName
from medialane.core.tensor import TensorSpec
from medialane.gateway.feature_source import FeatureSource
from medialane.gateway.gather_or_cancel import gather_or_cancel
from medialane.gateway.scope import RequestScope


class RequestMedia:
    """The items of one prompt (a `core.feature.StagedMedia`). The request's scope owns all their leases."""

    def __init__(self, source: MediaPrompt, features: FeatureSource, scope: RequestScope) -> None:
        self.source = source
        self.features = features
        self.scope = scope
        self._found: dict[StageName, tuple[StagedItem, ...]] = {}

    async def in_stage(self, stage: StageName) -> tuple[StagedItem, ...]:
        """Return the items in the form for `stage`. A URL's content may differ between stages: each item is identified
        by the content that is sent."""
        if (found := self._found.get(stage)) is None:
            find = FINDERS[STAGES[stage].sends]
            found = self._found[stage] = await gather_or_cancel([find(self, ref) for ref in self.source.items])
        return found


async def _processed(request: RequestMedia, ref: MediaRef) -> StagedItem:
    found = await request.features.processed(ref, request.source.options, request.scope.timeline)
    request.scope.take(found.hold)
    return StagedItem(ref, found.value, found.hold, is_hit=found.is_hit)


async def _decoded(request: RequestMedia, ref: MediaRef) -> StagedItem:
    found = await request.features.decoded(ref, request.scope.timeline)
    request.scope.take(found.hold)
    key = request.features.key(ref, request.source.options, content=found.content_hash)
    feature = msgspec.structs.replace(found.value, mm_hash=key)
    return StagedItem(ref, feature, found.hold, is_hit=found.is_hit)


async def _encoded(request: RequestMedia, ref: MediaRef) -> StagedItem:
    found = await request.features.encoded(ref, request.scope.timeline)
    request.scope.take(found.hold)
    encoded = found.value
    key = request.features.key(ref, request.source.options, content=found.content_hash)
    tensors = describe(encoded.range, (TensorSpec("uint8", (encoded.num_bytes,)),))
    feature = Feature(ref.modality, key, b"", tensors, MediaSize())
    return StagedItem(ref, feature, found.hold, media_type=encoded.media_type)


#: Functions that look up or prepare an item, by what its stage sends.
FINDERS: Mapping[str, Callable[[RequestMedia, MediaRef], Coroutine[Any, Any, StagedItem]]] = {
    "processed": _processed,
    "decoded": _decoded,
    "encoded": _encoded,
}
