"""The prompt in the form in which one way of handing over sends it."""

from __future__ import annotations

from collections.abc import Sequence

from medialane.arena import Lease
from medialane.core.errors import HandoverFailed
from medialane.core.feature import Feature, HandedFeature, PreparedPrompt
from medialane.core.request import ExpandedPrompt, Prompt, SourceItem, SourcePrompt
from medialane.gateway.features import FeatureSource
from medialane.gateway.scope import RequestScope
from medialane.transfer import Transport, Way


class Handover:
    """Builds what is sent, and pins what the worker will read."""

    def __init__(self, *, transports: Sequence[Transport], features: FeatureSource, max_inline_bytes: int) -> None:
        self._transports = {t.name: t for t in transports}
        self._features = features
        self._max_inline_bytes = max_inline_bytes

    async def prompt(
        self, way: Way, token_ids: list[int], prepared: PreparedPrompt, scope: RequestScope
    ) -> tuple[Prompt, list[Lease[Feature]]]:
        """The prompt for `way`, and leases on the entries that the worker reads. Raises HandoverFailed."""
        if way.stage == "url":
            return await self._source(prepared, scope), []
        return self._expanded(way, token_ids, prepared, scope)

    async def _source(self, prepared: PreparedPrompt, scope: RequestScope) -> SourcePrompt:
        items, total = [], 0
        for ref, mm_hash in zip(prepared.source.items, prepared.mm_hashes, strict=True):
            data = await self._features.encoded(ref, scope.timeline)
            total += len(data)
            items.append(SourceItem(ref.modality, mm_hash, data=data))
        if total > self._max_inline_bytes:
            raise HandoverFailed(f"{total} bytes of media are more than {self._max_inline_bytes} bytes in a message")
        scope.timeline.copied_bytes += total
        return SourcePrompt(prepared.source.token_ids, tuple(items), prepared.source.options)

    def _expanded(
        self, way: Way, token_ids: list[int], prepared: PreparedPrompt, scope: RequestScope
    ) -> tuple[ExpandedPrompt, list[Lease[Feature]]]:
        transport = self._transports[way.transport or "shm"]
        handed = []
        for placed in prepared.features:
            feature = placed.feature
            tensors = transport.publish(feature)
            handed.append(
                HandedFeature(
                    feature.modality, feature.mm_hash, feature.header, tensors, feature.size, placed.placeholder
                )
            )
        if way.transport == "shm":
            return ExpandedPrompt(token_ids, tuple(handed)), self._pin(prepared, scope)
        total = sum(placed.feature.nbytes for placed in prepared.features)
        if total > self._max_inline_bytes:
            raise HandoverFailed(f"{total} bytes of features are more than {self._max_inline_bytes} bytes in a message")
        scope.timeline.copied_bytes += total
        return ExpandedPrompt(token_ids, tuple(handed)), []

    def _pin(self, prepared: PreparedPrompt, scope: RequestScope) -> list[Lease[Feature]]:
        """A second lease on every entry, for the worker: it may outlive the request's scope."""
        return [scope.features[placed.feature.mm_hash].duplicate() for placed in prepared.features]
