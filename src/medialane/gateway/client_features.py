"""Features that clients name, or whose tensors they send, with prompts whose placeholders are expanded already."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from medialane.gateway.assembly import Assembly
from medialane.gateway.config import GatewayConfig
from medialane.gateway.image_budget import ImageBudget
from medialane.gateway.intake import placeholder_field
from medialane.gateway.request_media import RequestMedia
from medialane.gateway.scope import RequestScope
from medialane.gateway.store_features import StoreFeatures
from medialane.prepare.processor import ProcessedItem
from medialane.types.errors import InvalidFeature, InvalidRequest
from medialane.types.feature import (
    Feature,
    FoundItem,
    MediaPrompt,
    PlacedFeature,
    PlaceholderRange,
    PreparedPrompt,
    StagedItem,
)
from medialane.types.media import MediaRef
from medialane.types.stage import BEST_STAGE


class ClientFeatures:
    """All raise MedialaneError that names the field of the item. What is found is held by the scope of the request."""

    def __init__(self, config: GatewayConfig, features: StoreFeatures, assembly: Assembly) -> None:
        self._has_features = config.stage in ("auto", BEST_STAGE)
        self._features = features
        self._assembly = assembly

    async def find(self, ref: MediaRef, scope: RequestScope, *, encoder: str = "") -> StagedItem:
        """Return the feature that the client of `ref` names, made again if it was evicted. Raises UnknownMedia."""
        self._check_stage(ref)
        named = msgspec.structs.replace(ref, data=None)
        budget = ImageBudget(self._assembly, b"{}", scope.preparation)
        with scope.record.finding(ref) as timeline:
            found = await self._features.processed(named, b"{}", timeline, budget, encoder=encoder)
        return self._held(named, found, scope)

    async def put(self, ref: MediaRef, processed: ProcessedItem, scope: RequestScope) -> StagedItem:
        """Return the feature of tensors that a client has sent, under a key of ours."""
        self._check_stage(ref)
        with scope.record.finding(ref) as timeline:
            found = await self._features.put(ref, processed, timeline)
        return self._held(msgspec.structs.replace(ref, data=None, content=found.content_hash), found, scope)

    async def place(
        self, token_ids: list[int], items: Sequence[StagedItem], ranges: Sequence[PlaceholderRange], media: RequestMedia
    ) -> PreparedPrompt:
        """Return the prompt of these items, each at its range, which says only where its placeholder is. Raises
        InvalidRequest unless the prompt has the placeholders of the items there."""
        features = tuple(item.feature for item in items)
        try:
            placed = await self._assembly.place(token_ids, features, ranges)
        except InvalidFeature as error:
            raise error.at("features") from error
        for item, given, place in zip(items, ranges, placed, strict=True):
            if place is None:
                message = f"the prompt's {given.length} tokens at {given.offset} are not those of this item"
                raise InvalidRequest(message, param=placeholder_field(item.ref))
        places = [place for place in placed if place is not None]
        scope = media.scope
        scope.record.prepared(items, [place.num_embeds for place in places], is_reported=scope.wants_report)
        return PreparedPrompt(
            token_ids,
            tuple(map(PlacedFeature, features, places)),
            tuple(feature.mm_hash for feature in features),
            media.source,
            media,
        )

    def _check_stage(self, ref: MediaRef) -> None:
        if not self._has_features:
            raise InvalidRequest("features are not used by this server (--stage): send the media", param=ref.param)

    @staticmethod
    def _held(ref: MediaRef, found: FoundItem[Feature], scope: RequestScope) -> StagedItem:
        scope.defer(found.hold.release)
        scope.timeline.num_embeddings += found.value.embedding is not None
        return StagedItem(ref, found.value, found.hold, is_hit=found.is_hit, content_hash=found.content_hash)


def expanded_prompt(token_ids: list[int], items: Sequence[StagedItem]) -> MediaPrompt:
    return MediaPrompt(token_ids, tuple(item.ref for item in items))
