"""The router's view of a request."""

from __future__ import annotations

import msgspec

from medialane.types.feature import MediaSpan
from medialane.types.kv_events import BlockIds
from medialane.types.request import ModelCard


class RoutingRequest(msgspec.Struct, frozen=True, eq=False):
    """A prompt to be routed.

    `block_ids` are those of its full blocks, in order, by the tokens per block: at least one size, and every one that a
    worker has. `media` are in the order of their offsets. `handover_bytes` is the size of its media if sent to a worker
    on another host. `lora` is the adapter's name with its version, `model` the model that the worker must serve, `rank`
    the data-parallel rank that the client requested (None: any). `excluded` are workers that must not be chosen.
    """

    block_ids: dict[int, BlockIds]
    num_tokens: int
    media: tuple[MediaSpan, ...] = ()
    handover_bytes: int = 0
    lora: str | None = None
    model: str | None = None
    session_id: str | None = None
    rank: int | None = None
    excluded: frozenset[str] = frozenset()

    def blocks_at(self, card: ModelCard | None) -> tuple[int, BlockIds]:
        """Return a worker's block size and the prompt's block ids; none if those of this size are not known, or it has
        no prefix cache."""
        size, ids = next(iter(self.block_ids.items()))
        if card is None or card.block_size == size:
            return size, ids
        return card.block_size or size, self.block_ids.get(card.block_size, ids[:0])

    def num_usable(self, block_size: int) -> int:
        """Most blocks of this size that can come from an engine's cache: it always computes at least the last token."""
        return max(self.num_tokens - 1, 0) // block_size

    def __repr__(self) -> str:
        return f"RoutingRequest({self.num_tokens} tokens, {len(self.media)} items)"
