"""What one rank of an engine holds, in block ids of the house: the engine's events in, net changes out. Pure.

The engine's own hash of a block serves to find the block again, when it is another one's parent or is removed, and is
not looked into.

*Copies.* An engine may hold a block twice, when two requests computed it at the same time: it tells both, and removes
both one by one. The block is held until as many were removed as were stored.

*Groups.* Models with several kinds of attention have a KV cache for each, and store a block once per group. A prefix
can be taken up only as far as every full-attention group holds it, so a block counts as held when all of those hold it.
The other groups (sliding window, Mamba) need the end of a prefix only, drop the rest of it, and tell of incomplete runs
of blocks: they say nothing about a prefix. Where there is no full-attention group, the lowest one counts: its view is
too narrow, and better than none.

*Media.* Only what lies in the device's memory of this engine counts. vLLM's other media (CPU, STORAGE) are tiers
behind it, from which a prefix has to be loaded first; the same block is told of separately there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from medialane.core.block_hash import stored_block_ids
from medialane.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EngineHash, KvEvent

#: vLLM's names (`KVCacheSpecKind`) for caches that keep a whole prefix; engines with one group may leave the name out.
FULL_ATTENTION = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})

#: vLLM's name of the device's memory (`MEDIUM_GPU`), on CPUs too.
DEVICE = "GPU"

#: Bound where the engine does not tell how many blocks it has.
MAX_BLOCKS = 1 << 22


class NetChange(NamedTuple):
    """Block ids as in `KvChange`. With `snapshot`, `stored` is all that is held."""

    stored: bytes
    removed: bytes
    snapshot: bool


class _Group:
    """One KV cache group: our ids by the engine's hashes, and how many copies there are beyond one."""

    def __init__(self, index: int, *, full: bool) -> None:
        self.index = index
        self.full = full
        self.ids: dict[EngineHash, int] = {}
        self.copies: dict[EngineHash, int] = {}


class BlockTable:
    """Memory is one entry a block held, and never more than `max_blocks` a group (some 200 bytes each).

    `num_unknown_parents` counts events that follow a block which is not held, `num_unreadable` those that do not add
    up, `num_dropped` blocks above the bound: all three stay 0 with an engine whose events are understood.
    """

    def __init__(self, block_size: int, *, max_blocks: int = 0) -> None:
        self._block_size = block_size
        self._max_blocks = max_blocks or MAX_BLOCKS
        self._groups: dict[int, _Group] = {}
        self._counting: list[_Group] = []
        self._stored: set[int] = set()
        self._removed: set[int] = set()
        self._renewed = False
        self.num_unknown_parents = 0
        self.num_unreadable = 0
        self.num_dropped = 0
        self.num_clears = 0

    @property
    def num_faults(self) -> int:
        return self.num_unknown_parents + self.num_unreadable + self.num_dropped

    def apply(self, events: Sequence[KvEvent]) -> None:
        """Take up the events of one step. Never raises: what makes no sense is counted."""
        self._learn_groups(events)
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    self._remove(event)
                case AllBlocksCleared():
                    self._clear()

    def take(self) -> NetChange | None:
        """What has changed since the last call; None where nothing has."""
        if self._renewed:
            change = NetChange(pack(self.held()), b"", snapshot=True)
        elif self._stored or self._removed:
            change = NetChange(pack(self._stored), pack(self._removed), snapshot=False)
        else:
            return None
        self._renewed = False
        self._stored.clear()
        self._removed.clear()
        return change

    def held(self) -> list[int]:
        """The ids of all blocks that are held now."""
        if not self._counting:
            return []
        first, *others = self._counting
        if not others:
            return list(first.ids.values())
        return [found for key, found in first.ids.items() if all(key in group.ids for group in others)]

    def _learn_groups(self, events: Sequence[KvEvent]) -> None:
        """A step stores a block in all of its groups: look at the whole step before counting."""
        known = len(self._groups)
        for event in events:
            if isinstance(event, BlockStored) and _is_here(event):
                index = event.group_idx or 0
                if index not in self._groups:
                    self._groups[index] = _Group(index, full=event.kv_cache_spec_kind in FULL_ATTENTION)
        if len(self._groups) > known:
            self._choose_groups()

    def _choose_groups(self) -> None:
        groups = sorted(self._groups.values(), key=lambda group: group.index)
        counting = [group for group in groups if group.full] or groups[:1]
        if counting == self._counting:
            return
        for group in self._counting:
            if group not in counting:
                group.ids, group.copies = {}, {}
        self._renewed = self._renewed or bool(self._counting)
        self._counting = counting

    def _group(self, event: BlockStored | BlockRemoved) -> _Group | None:
        """Where the event belongs, if it counts."""
        if not _is_here(event):
            return None
        group = self._groups.get(event.group_idx or 0)
        return group if group in self._counting else None

    def _store(self, event: BlockStored) -> None:
        group = self._group(event)
        # Hybrid models also tell of parts of blocks, with the part's size: nobody looks those up.
        if group is None or event.block_size != self._block_size:
            return
        if all(key in group.ids for key in event.block_hashes):
            for key in event.block_hashes:
                group.copies[key] = group.copies.get(key, 0) + 1
            return
        for key, found in zip(event.block_hashes, self._ids(group, event), strict=False):  # no ids: counted there
            if key in group.ids:
                group.copies[key] = group.copies.get(key, 0) + 1
            else:
                group.ids[key] = found
                self._note(group, key, found, held=True)
        while len(group.ids) > self._max_blocks:
            self.num_dropped += 1
            self._forget(group, next(iter(group.ids)))

    def _ids(self, group: _Group, event: BlockStored) -> list[int]:
        """Our ids of the event's blocks; none where they cannot be known."""
        parent = None
        if event.parent_block_hash is not None:
            parent = group.ids.get(event.parent_block_hash)
            if parent is None:
                self.num_unknown_parents += 1
                return []
        try:
            found = stored_block_ids(
                event.token_ids,
                block_size=event.block_size,
                extra_keys=event.extra_keys,
                lora_name=event.lora_name,
                parent=parent,
            )
        except (ValueError, OverflowError):
            found = None
        if found is None or len(found) != len(event.block_hashes):
            self.num_unreadable += 1
            return []
        ids: list[int] = found.tolist()
        return ids

    def _remove(self, event: BlockRemoved) -> None:
        group = self._group(event)
        if group is None:
            return
        for key in event.block_hashes:
            if num_copies := group.copies.pop(key, 0):
                if num_copies > 1:
                    group.copies[key] = num_copies - 1
            else:
                self._forget(group, key)

    def _forget(self, group: _Group, key: EngineHash) -> None:
        found = group.ids.pop(key, None)
        group.copies.pop(key, None)
        if found is not None:
            self._note(group, key, found, held=False)

    def _note(self, group: _Group, key: EngineHash, found: int, *, held: bool) -> None:
        """A block came or went in `group`: that counts if the other groups hold it."""
        if len(self._counting) > 1 and not all(key in g.ids for g in self._counting if g is not group):
            return
        undone, done = (self._removed, self._stored) if held else (self._stored, self._removed)
        if found in undone:
            undone.remove(found)
        else:
            done.add(found)

    def _clear(self) -> None:
        self.num_clears += 1
        for group in self._counting:
            group.ids, group.copies = {}, {}
        self._stored.clear()
        self._removed.clear()
        self._renewed = True


def pack(ids: Iterable[int]) -> bytes:
    """Ids as a change carries them: u64, little-endian."""
    return np.fromiter(ids, dtype="<u8").tobytes()


def _is_here(event: BlockStored | BlockRemoved) -> bool:
    return event.medium in (None, DEVICE) and event.locality != "REMOTE"
