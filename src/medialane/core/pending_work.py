"""The work of a request that was sent to a worker and has no first token yet, for the worker's other gateways."""

from __future__ import annotations

from typing import Final

import msgspec

#: Limits of one announcement: ids of a prompt of any length (`routing.pending_blocks` samples them), its first items.
MAX_BLOCK_IDS: Final = 64
MAX_ITEMS: Final = 64
#: Longest mm_hash: ours are 64 hex digits.
_MAX_HASH: Final = 128
#: Largest number of embeddings and of milliseconds.
_MAX_COUNT: Final = 1 << 31

_ID_BYTES: Final = 8


class PendingWork(msgspec.Struct, frozen=True, array_like=True):
    """`block_ids` are ids of a prefix's blocks at increasing lengths, the last one of the longest, 8 bytes each, little
    endian. `items` are the mm_hashes that it reads from the encoder cache, with their embeddings; `work_ms` is the
    expected time of prefill and encoder. Raises ValueError beyond the limits: workers relay it between gateways."""

    rank: int
    block_ids: bytes
    items: tuple[tuple[str, int], ...]
    work_ms: float

    def __post_init__(self) -> None:
        if not (
            self.rank >= 0
            and len(self.block_ids) % _ID_BYTES == 0
            and len(self.block_ids) <= MAX_BLOCK_IDS * _ID_BYTES
            and len(self.items) <= MAX_ITEMS
            and all(len(mm_hash) <= _MAX_HASH and 0 <= count <= _MAX_COUNT for mm_hash, count in self.items)
            and 0 <= self.work_ms <= _MAX_COUNT
        ):
            raise ValueError("pending work out of range")

    def __repr__(self) -> str:
        num_ids = len(self.block_ids) // _ID_BYTES
        return f"PendingWork(rank {self.rank}, {num_ids} ids, {len(self.items)} items, {self.work_ms:.1f} ms)"
