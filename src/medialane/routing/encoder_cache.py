"""A model of the engines' encoder caches.

Engines do not report their contents. vLLM's `EncoderCacheManager` is simple enough to be mirrored from the requests
that are sent, by this gateway and, as announced, by others: an item enters when it is encoded, is pinned while a
request still has to prefill it, and the item that has been unpinned for longest is evicted when another needs the
space. A wrong guess costs or saves one run of the encoder and never affects results.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class _CachedItem:
    num_embeds: int
    num_pins: int = 0
    is_computed: bool = False


class EncoderCacheModel:
    """One engine's cache of `capacity` embeddings. Pure; `on_drop` is called with each item that is evicted.

    An item counts as cached from the moment a request with it is sent. Pinned items are never evicted, so waiting
    requests may together hold more than the capacity; that is resolved when they unpin.
    """

    def __init__(self, capacity: int, on_drop: Callable[[str], None]) -> None:
        self.capacity = capacity
        self._on_drop = on_drop
        self._entries: dict[str, _CachedItem] = {}
        self._unpinned: OrderedDict[str, None] = OrderedDict()
        self.num_embeds = 0  # of all cached items

    def __contains__(self, mm_hash: str) -> bool:
        return mm_hash in self._entries

    def pin(self, mm_hash: str, num_embeds: int) -> bool:
        """Hold an item for a request until `unpin`. Return False if it is larger than the cache."""
        if num_embeds > self.capacity:
            return False
        entry = self._entries.get(mm_hash)
        if entry is None:
            entry = self._entries[mm_hash] = _CachedItem(num_embeds)
            self.num_embeds += num_embeds
        entry.num_pins += 1
        self._unpinned.pop(mm_hash, None)
        self._shrink()
        return True

    def unpin(self, mm_hash: str, *, computed: bool) -> None:
        """Unpin an item that was prefilled (`computed`), or will not be: unless another request computed it, it is
        dropped."""
        entry = self._entries.get(mm_hash)
        if entry is None or not entry.num_pins:
            return
        entry.num_pins -= 1
        entry.is_computed |= computed
        if entry.num_pins:
            return
        if entry.is_computed:
            self._unpinned[mm_hash] = None
            self._shrink()
        else:
            self._drop(mm_hash)

    def clear(self) -> None:
        """Drop all items, after a restart of the engine."""
        self._unpinned.clear()
        for mm_hash in list(self._entries):
            self._drop(mm_hash)

    def _shrink(self) -> None:
        while self.num_embeds > self.capacity and self._unpinned:
            mm_hash, _ = self._unpinned.popitem(last=False)
            self._drop(mm_hash)

    def _drop(self, mm_hash: str) -> None:
        self.num_embeds -= self._entries.pop(mm_hash).num_embeds
        self._on_drop(mm_hash)


class EncoderCaches:
    """All slots' caches, and the slots that hold each item (bit masks: 1 << slot)."""

    def __init__(self) -> None:
        self._models: dict[int, EncoderCacheModel] = {}
        self._holders: dict[str, int] = {}

    @property
    def num_items(self) -> int:
        """Items in at least one slot's cache."""
        return len(self._holders)

    def use(self, slot: int) -> tuple[int, int]:
        """Return the embeddings in a slot's cache, and its capacity."""
        model = self._models[slot]
        return model.num_embeds, model.capacity

    def join(self, slot: int, capacity: int) -> None:
        """Add a slot with an empty cache of `capacity` embeddings (0: none, or unknown)."""
        self.leave(slot)
        self._models[slot] = EncoderCacheModel(capacity, lambda mm_hash: self._dropped(slot, mm_hash))

    def leave(self, slot: int) -> None:
        model = self._models.pop(slot, None)
        if model is not None:
            model.clear()

    def clear(self, slot: int) -> None:
        """Drop all items of the slot."""
        self._models[slot].clear()

    def holders(self, mm_hash: str) -> int:
        return self._holders.get(mm_hash, 0)

    def pin(self, slot: int, items: Iterable[tuple[str, int]]) -> list[str]:
        """Pin the items, (mm_hash, embeddings), of a request sent to `slot`; return the hashes to `unpin` later."""
        model, pinned = self._models[slot], []
        for mm_hash, num_embeds in items:
            if model.pin(mm_hash, num_embeds):
                self._holders[mm_hash] = self._holders.get(mm_hash, 0) | 1 << slot
                pinned.append(mm_hash)
        return pinned

    def unpin(self, slot: int, mm_hashes: Iterable[str], *, computed: bool) -> None:
        """Unpin items after prefill (`computed`) or when the request was dropped. Ignored if the slot has left."""
        model = self._models.get(slot)
        if model is not None:
            for mm_hash in mm_hashes:
                model.unpin(mm_hash, computed=computed)

    def _dropped(self, slot: int, mm_hash: str) -> None:
        left = self._holders[mm_hash] & ~(1 << slot)
        if left:
            self._holders[mm_hash] = left
        else:
            del self._holders[mm_hash]
