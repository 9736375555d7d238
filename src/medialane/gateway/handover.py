"""The prompt in the form in which one way of handing over sends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from medialane.arena import Lease, describe
from medialane.core.errors import HandoverFailed
from medialane.core.feature import Feature, HandedMedia, MediaPrompt, PreparedPrompt
from medialane.core.media import EncodedMedia, MediaRef, MediaSize
from medialane.core.request import ExpandedPrompt, SourcePrompt
from medialane.core.tensor import TensorDescriptor, TensorSpec
from medialane.gateway.features import FeatureSource
from medialane.gateway.scope import RequestScope
from medialane.gateway.side_by_side import side_by_side
from medialane.gateway.source_entry import SourceEntry, SourceStage
from medialane.transfer import HandedTensors, Transport, Way

_Leases = Sequence[Lease[Feature] | Lease[EncodedMedia]]


class Pins(NamedTuple):
    """Leases beside the scope's own, since the request may outlive its scope: on what the worker reads until it has
    released the request, and on what is read here until it is sent."""

    until_released: _Leases = ()
    until_sent: _Leases = ()


class Handover:
    """Builds what is sent, and pins what the worker will read."""

    def __init__(self, *, transports: Sequence[Transport], features: FeatureSource, max_inline_bytes: int) -> None:
        self._transports = {t.name: t for t in transports}
        self._features = features
        self._max_inline_bytes = max_inline_bytes

    def expanded(
        self, way: Way, token_ids: list[int], prepared: PreparedPrompt, scope: RequestScope
    ) -> tuple[ExpandedPrompt, Pins]:
        """The prompt for stage `features`, and leases on the entries that it refers to. Raises HandoverFailed."""
        features = [placed.feature for placed in prepared.features]
        tensors = [feature.tensors for feature in features]
        handed = tuple(
            HandedMedia(f.modality, f.mm_hash, f.header, published, f.size, placed.placeholder)
            for placed, f, published in zip(
                prepared.features, features, self._publish(way, tensors, scope), strict=True
            )
        )
        pins = _pins(way, [scope.features[f.mm_hash] for f in features])
        return ExpandedPrompt(token_ids, handed, prepared.source.options), pins

    async def source(
        self, way: Way, token_ids: list[int], prepared: PreparedPrompt, scope: RequestScope
    ) -> tuple[SourcePrompt, Pins]:
        """The same for stages `decoded` and `url`; `token_ids` are the prompt's as vLLM's app left them.

        Each item is known by what is sent: a URL may have other content than when it was prepared."""
        unexpanded = _unexpanded(token_ids, prepared)
        source = prepared.source
        if any(ref.options != b"{}" for ref in source.items):
            raise HandoverFailed("a worker processes all items of a request with the same options")
        stage: SourceStage = "decoded" if way.stage == "decoded" else "url"
        entries = await side_by_side([self.entry(stage, number, source, scope) for number in range(len(source.items))])
        published = self._publish(way, [entry.tensors for entry in entries], scope)
        media = tuple(entry.handed(tensors) for entry, tensors in zip(entries, published, strict=True))
        pins = _pins(way, [entry.lease for entry in entries])
        return SourcePrompt(unexpanded, media, source.options, stage), pins

    async def entry(self, stage: SourceStage, number: int, source: MediaPrompt, scope: RequestScope) -> SourceEntry:
        """The entry of item `number` in this stage, found or made once for the request, whose scope has the lease."""
        if (entry := scope.entries.get((stage, number))) is None:
            find = self._decoded if stage == "decoded" else self._encoded
            entry = scope.entries[stage, number] = await find(source.items[number], source.options, scope)
        return entry

    async def _decoded(self, ref: MediaRef, options: bytes, scope: RequestScope) -> SourceEntry:
        found = await self._features.find(ref, None, scope.timeline)
        scope.take(found.lease)
        key = self._features.key(ref, options, content=found.content_hash)
        media = found.lease.value
        return SourceEntry(ref, key, found.lease, media.tensors, media.size, is_hit=found.is_hit)

    async def _encoded(self, ref: MediaRef, options: bytes, scope: RequestScope) -> SourceEntry:
        lease = await self._features.encoded(ref, scope.timeline)
        scope.take(lease)
        encoded = lease.value
        key = self._features.key(ref, options, content=encoded.content_hash)
        tensors = describe(encoded.range, (TensorSpec("uint8", (encoded.num_bytes,)),))
        return SourceEntry(ref, key, lease, tensors, MediaSize(), media_type=encoded.media_type)

    def _publish(
        self, way: Way, tensors: Sequence[tuple[TensorDescriptor, ...]], scope: RequestScope
    ) -> list[HandedTensors]:
        """The tensors of every item as they travel."""
        if way.transport == "inline":
            total = sum(t.spec.nbytes for item in tensors for t in item)
            if total > self._max_inline_bytes:
                raise HandoverFailed(
                    f"{total} bytes of media are more than {self._max_inline_bytes} bytes in a message"
                )
            scope.timeline.copied_bytes += total
        return [self._transports[way.transport].publish(item) for item in tensors]


def _unexpanded(token_ids: list[int], prepared: PreparedPrompt) -> list[int]:
    """`token_ids` with the placeholders that the worker expands: vLLM's beam search appends the tokens of a beam.

    Raises HandoverFailed for an expanded prompt that was truncated, which the worker would not know.
    """
    if not prepared.features:
        return token_ids
    num_expanded = len(prepared.token_ids)
    if token_ids[:num_expanded] != prepared.token_ids:
        raise HandoverFailed("the prompt was truncated, which a worker that expands it would not know")
    return [*prepared.source.token_ids, *token_ids[num_expanded:]]


def _pins(way: Way, leases: _Leases) -> Pins:
    """Second leases on the entries, for as long as this way needs them."""
    duplicates = [lease.duplicate() for lease in leases]
    return Pins(until_released=duplicates) if way.transport == "shm" else Pins(until_sent=duplicates)
