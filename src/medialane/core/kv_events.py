"""What engines say of their KV caches, and what workers tell gateways of it.

An engine reports full blocks by hashes of its own (`KvEventBatch`). Its worker turns those into the house's block ids
(`core.block_hash`) and forwards nothing but ids (`KvChange`).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

#: The house's ids of KV blocks, one dimension.
BlockIds = NDArray[np.uint64]

#: An engine's own hash of a block. It identifies, and says nothing else: engines differ in how they make it.
EngineHash = int | bytes


class BlockStored(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """Consecutive full blocks that a prefix search finds from now on; fields as in vLLM's event of this name.

    `token_ids` are the tokens of all `block_hashes`, `parent_block_hash` the block before the first (None at a prompt's
    start). `extra_keys[i]` is what else went into block i: `[mm_hash, offset]` of the items in it, the offset counted
    from the block's start; the cache salt in a prompt's first block; the LoRA's name. A block may be stored several
    times, and is held until it was removed as often. `medium` None means "GPU", `group_idx` None the only group.
    """

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    token_ids: list[int]
    block_size: int
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[object] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    locality: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """Blocks whose memory the engine has taken for something else."""

    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """The rank holds nothing any more: its cache was reset, it has started again, or events of it are lost."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventBatch(msgspec.Struct, frozen=True):
    """What happened in one step of an engine, in order. `rank` is the data-parallel rank, `time_s` since the epoch."""

    rank: int
    events: Sequence[KvEvent]
    time_s: float = 0.0

    def __repr__(self) -> str:
        return f"KvEventBatch(rank={self.rank}, {len(self.events)} events)"


class KvChange(msgspec.Struct, frozen=True, array_like=True):
    """What a gateway learns of one rank of a worker: block ids, u64 little-endian, one after the other.

    `sequence` counts the changes of the rank on one connection, from 0. A `snapshot` replaces all that was known of the
    rank; `more`: its further ids follow in the next changes, which are no snapshots themselves. Else `stored` are held
    now and `removed` no more; a change that says what is known already is lawful. `time_s` is when the oldest of it
    happened, by the worker's clock (seconds since the epoch; 0 in snapshots).
    """

    rank: int
    sequence: int
    stored: bytes
    removed: bytes
    snapshot: bool = False
    more: bool = False
    time_s: float = 0.0

    def __repr__(self) -> str:
        kind = "snapshot, " if self.snapshot else ""
        return (
            f"KvChange(rank={self.rank}, sequence={self.sequence}, {kind}"
            f"+{len(self.stored) // 8} -{len(self.removed) // 8} blocks)"
        )


__all__ = ["AllBlocksCleared", "BlockRemoved", "BlockStored", "EngineHash", "KvChange", "KvEvent", "KvEventBatch"]
