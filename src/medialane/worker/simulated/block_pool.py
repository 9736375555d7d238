"""The KV cache of a simulated engine: blocks, who uses them, which are found again, which go first.

As vLLM 0.32's (v1/core/block_pool.py): a free block keeps its content until it is taken for something else. Free blocks
without content are taken first; then those that were freed longest ago, and of one request its last block first. Equal
blocks computed at the same time are kept, reported stored and reported removed twice. One block, the null block, is
never used.

Blocks without content are alike, so they are counted and not listed: a pool of a thousand workers takes memory for
what its workers hold only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from medialane.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent


class Block:
    """One block in use, or free with content. `block_id` is the house's id of what it holds."""

    __slots__ = ("block_id", "num_users")

    def __init__(self) -> None:
        self.block_id: int | None = None
        self.num_users = 0


class BlockPool:
    """`num_blocks` blocks, the null block among them. `mask` makes engine hashes of block ids, by exclusive or: nobody
    shall take one for the other."""

    def __init__(self, num_blocks: int, *, mask: int = 0) -> None:
        self._num_blocks = num_blocks
        self._mask = mask
        self._num_empty = num_blocks - 1
        self._free: OrderedDict[Block, None] = OrderedDict()  # with content, in the order in which they will be taken
        self._held: dict[int, Block | list[Block]] = {}
        self._events: list[KvEvent] = []

    @property
    def num_free(self) -> int:
        return self._num_empty + len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests use."""
        usable = self._num_blocks - 1
        return 1 - self.num_free / usable if usable else 0.0

    def find(self, ids: Iterable[int]) -> list[Block]:
        """The blocks of the longest prefix of `ids` that is held."""
        found = []
        for block_id in ids:
            held = self._held.get(block_id)
            if held is None:
                break
            found.append(held if isinstance(held, Block) else held[0])
        return found

    def use(self, blocks: Iterable[Block]) -> None:
        """One more request uses these blocks."""
        for block in blocks:
            if block.num_users == 0:
                del self._free[block]
            block.num_users += 1

    def take(self, num_blocks: int) -> list[Block]:
        """Blocks without content, for one request; there must be as many free ones."""
        empty = min(num_blocks, self._num_empty)
        self._num_empty -= empty
        taken = [Block() for _ in range(empty)]
        for _ in range(num_blocks - empty):
            block, _none = self._free.popitem(last=False)
            self._drop(block)
            taken.append(block)
        for block in taken:
            block.num_users = 1
        return taken

    def store(self, blocks: Sequence[Block], ids: Sequence[int], event: BlockStored) -> None:
        """These blocks, in use, are full now: they hold `ids`. `event` tells it, with ids where engine hashes go."""
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
        """One request less uses these blocks, given in the order in which they shall be taken."""
        for block in blocks:
            block.num_users -= 1
            if block.num_users == 0:
                if block.block_id is None:
                    self._num_empty += 1
                else:
                    self._free[block] = None

    def clear(self) -> bool:
        """Forget all content; False, and nothing done, while a request uses a block."""
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
        """What happened since the last call, in order."""
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
