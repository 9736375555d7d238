"""Finds media items at the store of this host (implements `gateway.FeatureSource`)."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TypeVar, cast

import msgspec

from medialane.core.errors import ProtocolViolation
from medialane.core.feature import Feature, FoundItem
from medialane.core.hashing import content_hash, feature_key, merged_options
from medialane.core.loop_fairness import LoopFairness
from medialane.core.media import EncodedMedia, MediaRef
from medialane.core.tensor import ArenaRange
from medialane.observability.timeline import StageTimeline
from medialane.store.holds import StoreHold
from medialane.store.link import StoreLink
from medialane.store.messages import AliasResolved, FindItem, Form, ItemFound, ResolveAlias

#: Bytes copied per iteration of the event loop, about 100 us.
_PIECE_BYTES = 512 * 1024

V = TypeVar("V")


class StoreFeatures:
    """Errors name the request field of the reference. Bytes that came with a request are hashed here, and written
    straight into the arena if the store does not have them."""

    def __init__(self, link: StoreLink, *, processor_digest: str, fairness: LoopFairness) -> None:
        self._link = link
        self._digest = processor_digest
        self._fairness = fairness

    async def resolve(self, ref: MediaRef) -> MediaRef:
        if not ref.is_alias:
            return ref
        reply = await self._link.call(lambda call_id: ResolveAlias(call_id, ref))
        return cast("AliasResolved", reply).ref

    def key(self, ref: MediaRef, options: bytes, *, content: str) -> str:
        return feature_key(
            processor=self._digest,
            content=content,
            io=ref.io,
            options=merged_options(options, ref.options),
            salt=ref.salt,
        )

    async def processed(self, ref: MediaRef, options: bytes, timeline: StageTimeline) -> FoundItem[Feature]:
        found = await self._find(ref, "processed", options, timeline)
        return self._item(found, found.feature)

    async def decoded(self, ref: MediaRef, timeline: StageTimeline) -> FoundItem[Feature]:
        found = await self._find(ref, "decoded", b"{}", timeline)
        return self._item(found, found.feature)

    async def encoded(self, ref: MediaRef, timeline: StageTimeline) -> FoundItem[EncodedMedia]:
        found = await self._find(ref, "encoded", b"{}", timeline)
        return self._item(found, found.encoded)

    async def _find(self, ref: MediaRef, form: Form, options: bytes, timeline: StageTimeline) -> ItemFound:
        data = ref.data
        if data is None:
            wanted, num_bytes, write = ref, None, None
        else:
            with timeline.measure("fetch"):
                content = await self._fairness.run(len(data), lambda: content_hash(data))
            wanted, num_bytes = msgspec.structs.replace(ref, data=None, content=content), len(data)
            write = partial(self._write, data, timeline)
        reply = await self._link.call(lambda call_id: FindItem(call_id, wanted, form, options, num_bytes), write)
        found = cast("ItemFound", reply)
        timeline.merge(found.timeline)
        return found

    async def _write(self, data: bytes, timeline: StageTimeline, entry: ArenaRange) -> None:
        """Copy `data` to the payload of `entry`, in pieces on the event loop, where cancellation takes effect between
        two pieces: a thread could still be writing to a range that has been reallocated."""
        async with self._fairness.step(len(data)):
            source = memoryview(data)
            for start in range(0, len(data), _PIECE_BYTES):
                await asyncio.sleep(0)
                piece = source[start : start + _PIECE_BYTES]
                self._link.payload(entry)[start : start + len(piece)] = piece  # raises if the store is lost
        timeline.copied_bytes += len(data)

    def _item(self, found: ItemFound, value: V | None) -> FoundItem[V]:
        if value is None:
            raise ProtocolViolation("the store has found an item in another form")
        hold = StoreHold(self._link, found.hold_id, found.range.arena)
        return FoundItem(found.content_hash, value, hold, found.is_hit)
