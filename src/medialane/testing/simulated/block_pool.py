"""The KV cache of a simulated engine: reference counts, prefix lookup and eviction order of blocks.

Like vLLM 0.32's (v1/core/block_pool.py): a free block keeps its content until it is reallocated. Free blocks without
content are allocated first, then the least recently freed, for one request its last block first. Equal blocks computed
at the same time are both kept, and reported as stored and removed twice. One block, the null block, is never used.

Blocks without content are only counted, so that the pools of a thousand workers need memory only for cached blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from medialane.types.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent


class Block:
    """One block in use, or free with content. `block_id` is our id of its content."""

    __slots__ = ("block_id", "num_users")

    def __init__(self) -> None:
        self.block_id: int | None = None
        self.num_users = 0


class BlockPool:
    """`num_blocks` blocks, including the null block. Engine hashes are block ids XOR `mask`, to detect mix-ups."""

    def __init__(self, num_blocks: int, *, mask: int = 0) -> None:
        self._num_blocks = num_blocks
        self._mask = mask
        self._num_empty = num_blocks - 1
        self._free: OrderedDict[Block, None] = OrderedDict()  # with content, in eviction order
        self._held: dict[int, Block | list[Block]] = {}
        self._events: list[KvEvent] = []

    @property
    def num_free(self) -> int:
        return self._num_empty + len(self._free)

    @property
    def usage(self) -> float:
        """Fraction of the blocks in use by requests."""
        usable = self._num_blocks - 1
        return 1 - self.num_free / usable if usable else 0.0

    def find(self, ids: Iterable[int]) -> list[Block]:
        """Return the blocks of the longest cached prefix of `ids`."""
        prefix = []
        for block_id in ids:
            held = self._held.get(block_id)
            if held is None:
                break
            prefix.append(held if isinstance(held, Block) else held[0])
        return prefix

    def use(self, blocks: Iterable[Block]) -> None:
        """Add a reference to each of these blocks."""
        for block in blocks:
            if block.num_users == 0:
                del self._free[block]
            block.num_users += 1

    def take(self, num_blocks: int) -> list[Block]:
        """Allocate blocks without content for one request; `num_blocks` must not exceed `num_free`."""
        empty = min(num_blocks, self._num_empty)
        self._num_empty -= empty
        allocated = [Block() for _ in range(empty)]
        for _ in range(num_blocks - empty):
            block, _none = self._free.popitem(last=False)
            self._drop(block)
            allocated.append(block)
        for block in allocated:
            block.num_users = 1
        return allocated

    def store(self, blocks: Sequence[Block], ids: Sequence[int], event: BlockStored) -> None:
        """Cache these full blocks in use under `ids`, and emit `event`."""
        for block, block_id in zip(blocks, ids, strict=True):
            block.block_id = block_id
            held = self._held.get(block_id)
            if held is None:
                self._held[block_id] = block
            elif isinstance(held, Block):
                self._held[block_id] = [held, block]
            else:
                held.append(block)
        self._events.append(event)

    def free(self, blocks: Iterable[Block]) -> None:
        """Remove a reference from each of these blocks, given in eviction order."""
        for block in blocks:
            block.num_users -= 1
            if block.num_users == 0:
                if block.block_id is None:
                    self._num_empty += 1
                else:
                    self._free[block] = None

    def clear(self) -> bool:
        """Drop all content. Return False, with no effect, while a request uses a block."""
        if self.num_free != self._num_blocks - 1:
            return False
        self._num_empty += len(self._free)
        self._free.clear()
        self._held.clear()
        self._events.append(AllBlocksCleared())
        return True

    def engine_hash(self, block_id: int) -> int:
        return block_id ^ self._mask

    def take_events(self) -> list[KvEvent]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _drop(self, block: Block) -> None:
        block_id = block.block_id
        if block_id is None:
            raise AssertionError("a free block in the queue has content")
        held = self._held[block_id]
        if isinstance(held, Block):
            del self._held[block_id]
        else:
            held.remove(block)
            if len(held) == 1:
                self._held[block_id] = held[0]
        block.block_id = None
        self._events.append(BlockRemoved([self.engine_hash(block_id)], medium="GPU", group_idx=0))
