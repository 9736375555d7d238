"""The KV cache of the fake engine: all full blocks of all prompts, until `forget` is called."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import msgspec

from medialane.core.hashing import content_hash
from medialane.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EngineHash, KvEvent, KvEventBatch
from medialane.core.request import EngineRequest


class FakeBlocks:
    """Reports the blocks of prompts to a listener like vLLM."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.listener: Callable[[KvEventBatch], None] | None = None
        self.held: dict[EngineHash, None] = {}

    def prefill(self, request: EngineRequest) -> int:
        """Store the prompt's blocks; return the number of its tokens that were already cached."""
        chain = list(self._chain(request))
        hashes = [found for found, _ in chain]
        num_held = next((i for i, found in enumerate(hashes) if found not in self.held), len(hashes))
        if num_held < len(hashes):
            self.held.update(dict.fromkeys(hashes[num_held:]))
            self.publish(self._stored(request, hashes, [keys for _, keys in chain], num_held))
        return min(num_held, (len(request.prompt.token_ids) - 1) // self.block_size) * self.block_size

    def forget(self, num_blocks: int | None = None) -> None:
        """Remove the `num_blocks` blocks that were stored last; all if None."""
        if num_blocks is None:
            self.held.clear()
            self.publish(AllBlocksCleared())
            return
        removed = [self.held.popitem()[0] for _ in range(min(num_blocks, len(self.held)))]
        self.publish(BlockRemoved(removed, medium="GPU", group_idx=0))

    def publish(self, *events: KvEvent) -> None:
        if self.listener is not None:
            self.listener(KvEventBatch(0, events, time.time()))

    def _stored(
        self, request: EngineRequest, hashes: list[EngineHash], keys: list[list[object] | None], start: int
    ) -> BlockStored:
        return BlockStored(
            block_hashes=hashes[start:],
            parent_block_hash=hashes[start - 1] if start else None,
            token_ids=request.prompt.token_ids[start * self.block_size : len(hashes) * self.block_size],
            block_size=self.block_size,
            medium="GPU",
            extra_keys=keys[start:],
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        )

    def _chain(self, request: EngineRequest) -> Iterator[tuple[EngineHash, list[object] | None]]:
        """Yield hash and extra keys of the prompt's full blocks."""
        token_ids, size = request.prompt.token_ids, self.block_size
        parent = 0
        for start in range(0, len(token_ids) - size + 1, size):
            keys = self._extra_keys(request, start)
            block = msgspec.msgpack.encode((parent, token_ids[start : start + size], keys))
            parent = int(content_hash(block)[:16], 16)
            yield parent, keys

    def _extra_keys(self, request: EngineRequest, start: int) -> list[object] | None:
        places = [(item.mm_hash, item.placeholder) for item in request.prompt.media if item.placeholder is not None]
        keys: list[object] = [
            [mm_hash, place.offset - start]
            for mm_hash, place in places
            if place.offset < start + self.block_size and place.end > start
        ]
        if start == 0 and request.cache_salt:
            keys.append(request.cache_salt)
        return keys or None
