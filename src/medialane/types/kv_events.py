"""KV-cache events: from engine to worker, and from worker to gateway.

An engine reports full blocks by its own hashes (`KvEventBatch`). Its worker converts them to our block ids
(`types.block_hash`) and forwards only ids (`KvChange`).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

#: Our ids of KV blocks, one dimension.
BlockIds = NDArray[np.uint64]

#: An engine's own hash of a block: an opaque identifier, since engines differ in how they compute it.
EngineHash = int | bytes


class BlockStored(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """Consecutive full blocks that were added to the prefix cache; fields as in vLLM's event of the same name.

    `token_ids` are the tokens of all `block_hashes`, `parent_block_hash` is the block before the first (None at a
    prompt's start). `extra_keys[i]` are the other inputs of block i's hash: `[mm_hash, offset]` of the items in it, the
    offset relative to the block's start; the cache salt in a prompt's first block; the LoRA's name. A block may be
    stored several times, and is held until it was removed as often. `medium` None means "GPU", `group_idx` None the
    only group. `lookahead_token_ids`
    (vLLM 0.33) are tokens after each block that its hash depends on: an engine with them holds no block by its own
    tokens alone.
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
    lookahead_token_ids: list[list[int]] | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """Blocks that the engine has evicted."""

    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """The rank holds no blocks any more: its cache was reset, it has restarted, or some of its events were lost."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventBatch(msgspec.Struct, frozen=True):
    """The events of one engine step, in order. `rank` is the data-parallel rank, `time_s` seconds since the epoch."""

    rank: int
    events: Sequence[KvEvent]
    time_s: float = 0.0

    def __repr__(self) -> str:
        return f"KvEventBatch(rank={self.rank}, {len(self.events)} events)"


class KvChange(msgspec.Struct, frozen=True, array_like=True):
    """A change of the blocks that one rank of a worker holds: packed block ids, u64 little-endian.

    A `snapshot` replaces everything known about the rank; with `more`, the rest of its ids follows in the next changes,
    which do not have `snapshot` set. Otherwise `stored` are now held and `removed` are not; a change may repeat known
    facts. `age_s` is the time between its oldest event and its report, both by the clock of the worker's host (0 in
    snapshots): clocks of hosts are never compared.
    """

    rank: int
    stored: bytes
    removed: bytes
    snapshot: bool = False
    more: bool = False
    age_s: float = 0.0

    def __repr__(self) -> str:
        kind = "snapshot, " if self.snapshot else ""
        return f"KvChange(rank={self.rank}, {kind}+{len(self.stored) // 8} -{len(self.removed) // 8} blocks)"
