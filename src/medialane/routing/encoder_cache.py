"""What the engines' encoder caches hold, as far as it can be known from here.

Engines do not tell. vLLM's `EncoderCacheManager` is simple enough to be mirrored from the requests that are sent: an
item enters when it is encoded, is pinned while a request still has to prefill it, and the item that has been unpinned
for longest makes room when another needs it. The mirror is wrong where another gateway sends to the same worker; it is
a guess that costs or saves one run of the encoder, never an answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


class _Entry:
    __slots__ = ("is_computed", "num_embeds", "num_pins")

    def __init__(self, num_embeds: int) -> None:
        self.num_embeds = num_embeds
        self.num_pins = 0
        self.is_computed = False


class EncoderCacheModel:
    """One engine's cache of `capacity` embeddings. Pure; `on_drop` is told of each item that is held no more.

    An item counts as held from the moment a request that brings it is sent. What is pinned is never dropped, so
    requests that wait may together hold more than fits; that is settled when they let go.
    """

    def __init__(self, capacity: int, on_drop: Callable[[str], None]) -> None:
        self._capacity = capacity
        self._on_drop = on_drop
        self._entries: dict[str, _Entry] = {}
        self._unpinned: OrderedDict[str, None] = OrderedDict()
        self._num_embeds = 0

    def __contains__(self, mm_hash: str) -> bool:
        return mm_hash in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_embeds(self) -> int:
        return self._num_embeds

    def pin(self, mm_hash: str, num_embeds: int) -> bool:
        """A request needs the item: it is held until `unpin`. False if the cache can never hold it."""
        if num_embeds > self._capacity:
            return False
        entry = self._entries.get(mm_hash)
        if entry is None:
            entry = self._entries[mm_hash] = _Entry(num_embeds)
            self._num_embeds += num_embeds
        entry.num_pins += 1
        self._unpinned.pop(mm_hash, None)
        self._shrink()
        return True

    def unpin(self, mm_hash: str, *, computed: bool) -> None:
        """The request has prefilled the item (`computed`), or will not: then nobody else's encoding is left of it."""
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
        """The engine has started again."""
        self._unpinned.clear()
        for mm_hash in list(self._entries):
            self._drop(mm_hash)

    def _shrink(self) -> None:
        while self._num_embeds > self._capacity and self._unpinned:
            mm_hash, _ = self._unpinned.popitem(last=False)
            self._drop(mm_hash)

    def _drop(self, mm_hash: str) -> None:
        self._num_embeds -= self._entries.pop(mm_hash).num_embeds
        self._on_drop(mm_hash)


class EncoderCaches:
    """All slots' caches, and which slots hold an item (a bit mask: 1 << slot)."""

    def __init__(self) -> None:
        self._models: dict[int, EncoderCacheModel] = {}
        self._holders: dict[str, int] = {}

    @property
    def num_items(self) -> int:
        """Items that at least one slot holds."""
        return len(self._holders)

    def join(self, slot: int, capacity: int) -> None:
        """A slot with an empty cache of `capacity` embeddings (0: none that we know of)."""
        self.leave(slot)
        self._models[slot] = EncoderCacheModel(capacity, lambda mm_hash: self._dropped(slot, mm_hash))

    def leave(self, slot: int) -> None:
        model = self._models.pop(slot, None)
        if model is not None:
            model.clear()

    def clear(self, slot: int) -> None:
        """The slot's engine holds no item any more."""
        self._models[slot].clear()

    def holders(self, mm_hash: str) -> int:
        return self._holders.get(mm_hash, 0)

    def pin(self, slot: int, items: Iterable[tuple[str, int]]) -> list[str]:
        """A request with these items, (mm_hash, embeddings), goes to `slot`; returns those to `unpin` later."""
        model, pinned = self._models[slot], []
        for mm_hash, num_embeds in items:
            if model.pin(mm_hash, num_embeds):
                self._holders[mm_hash] = self._holders.get(mm_hash, 0) | 1 << slot
                pinned.append(mm_hash)
        return pinned

    def unpin(self, slot: int, mm_hashes: Iterable[str], *, computed: bool) -> None:
        """What `pin` returned has been prefilled (`computed`) or given up. A slot that left meanwhile is nothing."""
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
