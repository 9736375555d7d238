"""The prompt in the form in which one way of handing over sends it."""

from __future__ import annotations

from collections.abc import Sequence

from medialane.arena import Lease
from medialane.core.errors import HandoverFailed
from medialane.core.feature import Feature, HandedMedia, PreparedPrompt
from medialane.core.request import ExpandedPrompt, Prompt, SourcePrompt
from medialane.core.tensor import InlineTensor, TensorSpec
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
            if prepared.features and len(token_ids) != len(prepared.token_ids):
                raise HandoverFailed("the prompt was truncated, which a worker that expands it would not know")
            return await self._source(prepared, scope), []
        return self._expanded(way, token_ids, prepared, scope)

    async def _source(self, prepared: PreparedPrompt, scope: RequestScope) -> SourcePrompt:
        """The items by value. Each is known by what is sent: a URL may have other content than when it was prepared."""
        source = prepared.source
        items, total = [], 0
        for ref in source.items:
            loaded = await self._features.load(ref, scope.timeline)
            total += len(loaded.data or b"")
            if total > self._max_inline_bytes:
                raise HandoverFailed(f"the media are more than {self._max_inline_bytes} bytes in a message")
            key = self._features.key(loaded, source.options)
            data = loaded.data or b""
            tensor = InlineTensor(TensorSpec("uint8", (len(data),)), data)
            items.append(
                HandedMedia(ref.modality, key, b"", (tensor,), media_type=loaded.media_type, io=ref.io, param=ref.param)
            )
        scope.timeline.copied_bytes += total
        return SourcePrompt(source.token_ids, tuple(items), source.options)

    def _expanded(
        self, way: Way, token_ids: list[int], prepared: PreparedPrompt, scope: RequestScope
    ) -> tuple[ExpandedPrompt, list[Lease[Feature]]]:
        total = sum(placed.feature.nbytes for placed in prepared.features)
        if way.transport == "inline" and total > self._max_inline_bytes:
            raise HandoverFailed(f"{total} bytes of features are more than {self._max_inline_bytes} bytes in a message")
        transport = self._transports[way.transport or "shm"]
        handed = []
        for placed in prepared.features:
            feature = placed.feature
            tensors = transport.publish(feature)
            handed.append(
                HandedMedia(
                    feature.modality, feature.mm_hash, feature.header, tensors, feature.size, placed.placeholder
                )
            )
        expanded = ExpandedPrompt(token_ids, tuple(handed), prepared.source.options)
        if way.transport == "shm":
            return expanded, self._pin(prepared, scope)
        scope.timeline.copied_bytes += total
        return expanded, []

    def _pin(self, prepared: PreparedPrompt, scope: RequestScope) -> list[Lease[Feature]]:
        """A second lease on every entry, for the worker: it may outlive the request's scope."""
        return [scope.features[placed.feature.mm_hash].duplicate() for placed in prepared.features]
