"""The blocks that one rank of an engine holds, in our block ids: the engine's events in, net changes out.

The table does no I/O; `BlockReports` reports the changes to gateways, batched over some milliseconds.

The engine's own hash of a block is an opaque key to find the block when it is a parent or is removed.

*Copies.* An engine may hold a block twice, if two requests computed it at the same time: it reports both as stored and,
one by one, as removed. The block is held until it was removed as often as it was stored.

*Groups.* Models with several kinds of attention have a KV cache group for each, and store a block once per group. A
prefix can be reused only as far as every full-attention group holds it, so a block counts as held if all of them hold
it. Other groups (sliding window, Mamba) need only the end of a prefix, drop the rest of it, and report incomplete runs
of blocks, so they are ignored. Without a full-attention group, the lowest one counts: incomplete, but better than none.

*Media.* Only blocks in this engine's device memory count. vLLM's other media (CPU, STORAGE) are lower tiers, from which
a prefix has to be loaded first; a block is reported separately there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from medialane.types.kv_blocks import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineHash,
    KvChange,
    KvEvent,
    KvEventBatch,
    stored_block_ids,
)
from medialane.types.request import ModelCard

#: vLLM's names (`KVCacheSpecKind`) of caches that keep a whole prefix; engines with one group may omit the name.
FULL_ATTENTION = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})

#: vLLM's name of device memory (`MEDIUM_GPU`), also on CPUs.
DEVICE = "GPU"

#: Limit if the engine does not report its number of blocks.
MAX_BLOCKS = 1 << 22


class _Group:
    """One KV cache group: our ids by the engine's hashes, and the number of additional copies."""

    def __init__(self, index: int, *, full: bool) -> None:
        self.index = index
        self.full = full
        self.ids: dict[EngineHash, int] = {}
        self.copies: dict[EngineHash, int] = {}


class BlockTable:
    """Has one entry per held block, at most `max_blocks` per group (about 200 bytes each).

    `num_unknown_parents` counts events whose parent block is not held, `num_unreadable` inconsistent events,
    `num_dropped` blocks above the limit: all three stay 0 with a supported engine. `hashes_lookahead`: the engine's
    blocks depend on tokens after them, so none of them counts as held.
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
        self.hashes_lookahead = False

    @property
    def num_faults(self) -> int:
        return self.num_unknown_parents + self.num_unreadable + self.num_dropped

    def apply(self, events: Sequence[KvEvent]) -> None:
        """Apply the events of one step. Never raises: invalid events are counted."""
        self._learn_groups(events)
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    self._remove(event)
                case AllBlocksCleared():
                    self._clear()

    def take(self, rank: int = 0, age_s: float = 0.0) -> KvChange | None:
        """Return the changes since the last call, as this rank's; None if there are none. Of a snapshot,
        `stored` are all held blocks."""
        if self._renewed:
            change = KvChange(rank, pack(self.held()), b"", snapshot=True, age_s=age_s)
        elif self._stored or self._removed:
            change = KvChange(rank, pack(self._stored), pack(self._removed), age_s=age_s)
        else:
            return None
        self._renewed = False
        self._stored.clear()
        self._removed.clear()
        return change

    def held(self) -> list[int]:
        """Return the ids of all blocks that are held now."""
        if not self._counting:
            return []
        first, *others = self._counting
        if not others:
            return list(first.ids.values())
        return [block_id for key, block_id in first.ids.items() if all(key in group.ids for group in others)]

    def _learn_groups(self, events: Sequence[KvEvent]) -> None:
        """Detect new groups in the whole step first, since a step stores a block in all of its groups."""
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
        """Return the event's group, None if it does not count."""
        if not _is_here(event):
            return None
        group = self._groups.get(event.group_idx or 0)
        return group if group in self._counting else None

    def _store(self, event: BlockStored) -> None:
        group = self._group(event)
        # Hybrid models also report partial blocks, with their own block size; these are never looked up.
        if group is None or event.block_size != self._block_size:
            return
        if event.lookahead_token_ids is not None:
            self.hashes_lookahead = True
            return
        if all(key in group.ids for key in event.block_hashes):
            for key in event.block_hashes:
                group.copies[key] = group.copies.get(key, 0) + 1
            return
        for key, block_id in zip(event.block_hashes, self._ids(group, event), strict=False):  # no ids if invalid
            if key in group.ids:
                group.copies[key] = group.copies.get(key, 0) + 1
            else:
                group.ids[key] = block_id
                self._record(group, key, block_id, held=True)
        while len(group.ids) > self._max_blocks:
            self.num_dropped += 1
            self._forget(group, next(iter(group.ids)))

    def _ids(self, group: _Group, event: BlockStored) -> list[int]:
        """Return our ids of the event's blocks; count the event and return none if it is invalid."""
        parent = None
        if event.parent_block_hash is not None:
            parent = group.ids.get(event.parent_block_hash)
            if parent is None:
                self.num_unknown_parents += 1
                return []
        try:
            block_ids = stored_block_ids(
                event.token_ids,
                block_size=event.block_size,
                extra_keys=event.extra_keys,
                lora_name=event.lora_name,
                parent=parent,
            )
        except (ValueError, OverflowError):
            block_ids = None
        if block_ids is None or len(block_ids) != len(event.block_hashes):
            self.num_unreadable += 1
            return []
        ids: list[int] = block_ids.tolist()
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
        block_id = group.ids.pop(key, None)
        group.copies.pop(key, None)
        if block_id is not None:
            self._record(group, key, block_id, held=False)

    def _record(self, group: _Group, key: EngineHash, block_id: int, *, held: bool) -> None:
        """Record that a block was added to or removed from `group`, if all other groups hold it."""
        if len(self._counting) > 1 and not all(key in g.ids for g in self._counting if g is not group):
            return
        undone, done = (self._removed, self._stored) if held else (self._stored, self._removed)
        if block_id in undone:
            undone.remove(block_id)
        else:
            done.add(block_id)

    def _clear(self) -> None:
        self.num_clears += 1
        for group in self._counting:
            group.ids, group.copies = {}, {}
        self._stored.clear()
        self._removed.clear()
        self._renewed = True


def pack(ids: Iterable[int]) -> bytes:
    """Encode ids as in `KvChange`: u64, little-endian."""
    return np.fromiter(ids, dtype="<u8").tobytes()


def _is_here(event: BlockStored | BlockRemoved) -> bool:
    return event.medium in (None, DEVICE) and event.locality != "REMOTE"


logger = logging.getLogger(__name__)

#: Time over which events are batched: an engine under load takes 10 to 50 ms per step, and reports it in several
#: batches.
REPORT_PAUSE_S = 0.01

#: More events than this are reported immediately: a listener needs some microseconds for each.
MAX_WAITING_EVENTS = 2048

Listener = Callable[[KvChange], None]


class BlockReports:
    """The block tables of all ranks and their listeners. Used on one event loop."""

    def __init__(self, card: ModelCard, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._tables = {
            rank: BlockTable(card.block_size, max_blocks=card.num_kv_blocks)
            for rank in range(max(1, card.data_parallel_size))
        }
        self._listeners: list[Listener] = []
        self._since: dict[int, float] = {}
        self._num_waiting = 0
        self._waiting: asyncio.TimerHandle | None = None
        self._num_faults_logged = 0
        #: The engine's blocks cannot be compared with prompts: gateways get none.
        self.has_unknown_blocks = False

    def apply(self, batch: KvEventBatch) -> None:
        """Apply the engine's events (the listener of `Engine.watch_blocks`)."""
        table = self._tables.get(batch.rank)
        if table is None:
            logger.error("KV events of rank %d, which the engine does not have", batch.rank)
            return
        table.apply(batch.events)
        if table.hashes_lookahead and not self.has_unknown_blocks:
            self.has_unknown_blocks = True
            logger.error(
                "the engine's KV blocks depend on tokens after them (lookahead_token_ids, with speculative decoding): "
                "requests are routed to this worker without regard to its KV cache"
            )
        self._since.setdefault(batch.rank, batch.time_s)
        self._num_waiting += len(batch.events)
        if self._num_waiting > MAX_WAITING_EVENTS:
            self._report()
        elif self._waiting is None:
            self._waiting = asyncio.get_running_loop().call_later(REPORT_PAUSE_S, self._report)

    def watch(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` with every change until the returned function is called."""
        self._report()
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def held(self) -> dict[int, list[int]]:
        """Return the ids that each rank holds; listeners have been called for all earlier changes."""
        self._report()
        return {rank: table.held() for rank, table in self._tables.items()}

    def num_clears(self) -> dict[int, int]:
        """Return how often each rank's cache has been cleared."""
        return {rank: table.num_clears for rank, table in self._tables.items()}

    def clear(self, *, unless_since: Mapping[int, int]) -> None:
        """Clear the tables, except for ranks for which the engine has reported it since `num_clears` returned
        `unless_since`: they may have stored blocks again."""
        for rank, table in self._tables.items():
            if table.num_clears == unless_since[rank]:
                table.apply([AllBlocksCleared()])
        self._report()

    def close(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _report(self) -> None:
        self.close()
        self._num_waiting = 0
        for rank, table in self._tables.items():
            since = self._since.pop(rank, 0.0)
            age_s = max(0.0, self._clock() - since) if since else 0.0
            if (change := table.take(rank, age_s)) is not None:
                for listener in list(self._listeners):
                    listener(change)
        self._log_faults()

    def _log_faults(self) -> None:
        """Log when the number of faults has doubled: a fault may repeat with every block."""
        num_faults = sum(table.num_faults for table in self._tables.values())
        if num_faults >= max(1, 2 * self._num_faults_logged):
            self._num_faults_logged = num_faults
            details = ", ".join(
                f"rank {rank}: {t.num_unknown_parents} with an unknown parent, {t.num_unreadable} unreadable, "
                f"{t.num_dropped} blocks over the limit"
                for rank, t in self._tables.items()
                if t.num_faults
            )
            logger.warning("KV events that could not be applied so far (%s): routing may miss cached blocks", details)
