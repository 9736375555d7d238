"""What the router needs to know of a request."""

from __future__ import annotations

import msgspec
import numpy as np

from medialane.core.feature import MediaSpan
from medialane.core.kv_events import BlockIds


class RoutingRequest(msgspec.Struct, frozen=True, eq=False):
    """A prompt on its way to a worker.

    `block_ids` are those of its full blocks of `block_size` tokens, in order, contiguous and writable; `media` stand in
    the order of their offsets. `handover_bytes` is what a worker on another host would be sent. `lora` is the adapter's
    name, `model` what the worker must serve, `rank` the data-parallel rank that the client asks for (None: any).
    `request_id` names the request in records of decisions.
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

    def __post_init__(self) -> None:
        ids = self.block_ids
        if ids.dtype != np.uint64 or not ids.flags.carray:  # native code would be compiled for anything else
            raise ValueError("block_ids must be a contiguous, writable array of uint64")

    @property
    def max_cached_blocks(self) -> int:
        """An engine computes at least the last token, so at most these blocks can come from its cache."""
        return min(len(self.block_ids), max(self.num_tokens - 1, 0) // self.block_size)

    def __repr__(self) -> str:
        return f"RoutingRequest({self.num_tokens} tokens, {len(self.block_ids)} blocks, {len(self.media)} items)"
