"""The router's view of a request."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from medialane.core.feature import MediaSpan
from medialane.core.kv_events import BlockIds
from medialane.core.request import ModelCard


class PromptBlocks(NamedTuple):
    """A prompt in blocks of `size` tokens: the ids of the full ones."""

    size: int
    ids: BlockIds
    num_tokens: int

    @property
    def num_usable(self) -> int:
        """Most blocks that can come from an engine's cache: it always computes at least the last token."""
        return min(len(self.ids), max(self.num_tokens - 1, 0) // self.size)


class RoutingRequest(msgspec.Struct, frozen=True, eq=False):
    """A prompt to be routed.

    `block_ids` are those of its full blocks of `block_size` tokens, in order, contiguous and writable;
    `other_block_ids` are those by other block sizes that workers have. `media` are in the order of their offsets.
    `handover_bytes` is the size of its media if sent to a worker on another host. `lora` is the adapter's name, `model`
    the model that the worker must serve, `rank` the data-parallel rank that the client requested (None: any).
    `excluded` are workers that must not be chosen. `request_id` identifies the request in decision records.
    """

    block_ids: BlockIds
    block_size: int
    num_tokens: int
    media: tuple[MediaSpan, ...] = ()
    handover_bytes: int = 0
    lora: str | None = None
    model: str | None = None
    session_id: str | None = None
    rank: int | None = None
    request_id: str = ""
    excluded: frozenset[str] = frozenset()
    other_block_ids: dict[int, BlockIds] = {}

    def __post_init__(self) -> None:
        ids = self.block_ids
        if ids.dtype != np.uint64 or not ids.flags.carray:  # numba would compile a specialisation for anything else
            raise ValueError("block_ids must be a contiguous, writable array of uint64")

    def blocks_at(self, card: ModelCard | None) -> PromptBlocks:
        """Return the prompt's blocks at a worker; none if the ids by its block size are not known, or it has no prefix
        cache."""
        if card is None or card.block_size == self.block_size:
            return PromptBlocks(self.block_size, self.block_ids, self.num_tokens)
        if not card.block_size:
            return PromptBlocks(self.block_size, self.block_ids[:0], self.num_tokens)
        ids = self.other_block_ids.get(card.block_size, self.block_ids[:0])
        return PromptBlocks(card.block_size, ids, self.num_tokens)

    def __repr__(self) -> str:
        return f"RoutingRequest({self.num_tokens} tokens, {len(self.block_ids)} blocks, {len(self.media)} items)"
