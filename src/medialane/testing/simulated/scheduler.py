"""Schedules the tokens of a simulated engine's steps, and keeps its encoder cache.

Like vLLM 0.32's (v1/core/sched/scheduler.py), for one rank and one KV cache group, FIFO. Running requests come first. A
prompt is computed in chunks within the step's token budget. If no block is free, the last running request is preempted
and recomputed. A waiting request starts when its whole prompt fits, and never overtakes another. It uses no clock and
no event loop.

A step is two calls: `step` allocates blocks and encoder cache space, and makes full blocks available at once, also for
requests of the same step, like vLLM; `complete` appends the tokens, after the step's duration.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from medialane.testing.simulated.sequence import Block, BlockPool, SimulatedSequence
from medialane.types.kv_blocks import KvEvent


@dataclass(slots=True)
class SimulatedStep:
    """The work of one step: number of tokens by sequence, and totals that determine its duration. `num_prefill_pairs`
    is the sum over prompt tokens of the number of tokens that they attend to; `num_embeds` are computed by the encoder,
    `num_loaded_embeds` are copied from the arena."""

    tokens: dict[SimulatedSequence, int] = field(default_factory=dict)
    num_prefill_tokens: int = 0
    num_prefill_pairs: int = 0
    num_decode_tokens: int = 0
    num_embeds: int = 0
    num_loaded_embeds: int = 0


class EncoderCache:
    """The encoder cache of an engine, like vLLM 0.32's (v1/core/encoder_cache_manager.py).

    An item stays while requests refer to it, and then until its space is needed; the item unreferenced for the longest
    time is evicted first. Sizes are numbers of embeddings.
    """

    def __init__(self, size: int) -> None:
        self._num_free = size
        self._num_freeable = size  # free or unreferenced
        self._users: dict[str, set[str]] = {}
        self._sizes: dict[str, int] = {}
        self._unused: OrderedDict[str, int] = OrderedDict()

    def __contains__(self, mm_hash: str) -> bool:
        return mm_hash in self._users

    def use(self, mm_hash: str, request_id: str) -> bool:
        """Add a reference to a cached item; return False if it is not cached."""
        users = self._users.get(mm_hash)
        if users is None:
            return False
        if not users:
            self._num_freeable -= self._unused.pop(mm_hash)
        users.add(request_id)
        return True

    def make_room(self, num_embeds: int) -> bool:
        """Evict unused items until there is space. Return False, with no effect, if there cannot be enough."""
        if num_embeds > self._num_freeable:
            return False
        while num_embeds > self._num_free:
            mm_hash, size = self._unused.popitem(last=False)
            del self._users[mm_hash], self._sizes[mm_hash]
            self._num_free += size
        return True

    def add(self, mm_hash: str, num_embeds: int, request_id: str) -> None:
        """Add a new item after `make_room`."""
        self._users[mm_hash] = {request_id}
        self._sizes[mm_hash] = num_embeds
        self._num_free -= num_embeds
        self._num_freeable -= num_embeds

    def release(self, mm_hash: str, request_id: str) -> None:
        """Remove the request's reference to the item, if it has one."""
        users = self._users.get(mm_hash)
        if not users or request_id not in users:
            return
        users.discard(request_id)
        if not users:
            self._unused[mm_hash] = self._sizes[mm_hash]
            self._num_freeable += self._sizes[mm_hash]


class Scheduler:
    """Sequences are added, and may be removed before their end; finished ones are removed by `complete`."""

    def __init__(
        self,
        pool: BlockPool,
        encoder_cache: EncoderCache,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_encoder_tokens: int,
    ) -> None:
        self.pool = pool
        self.encoder_cache = encoder_cache
        self.running: list[SimulatedSequence] = []
        self.waiting: deque[SimulatedSequence] = deque()
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_encoder_tokens = max_encoder_tokens
        self._token_budget = 0
        self._encoder_budget = 0

    def add(self, sequence: SimulatedSequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: SimulatedSequence) -> None:
        """Remove a sequence early. No effect if it has finished."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)

    def step(self) -> SimulatedStep:
        """Plan the next step; it has no tokens if there is no work."""
        step = SimulatedStep()
        self._token_budget = self._max_num_batched_tokens
        self._encoder_budget = self._max_encoder_tokens
        if self._schedule_running(step):
            self._schedule_waiting(step)
        return step

    def complete(self, step: SimulatedStep) -> list[SimulatedSequence]:
        """Apply the results of a step; return the sequences that gained an output token."""
        gained = []
        for sequence, num_tokens in step.tokens.items():
            if not sequence.blocks:
                continue  # removed or preempted in the meantime
            sequence.num_computed += num_tokens
            if sequence.num_new == 0:
                sequence.append_token()
                gained.append(sequence)
            if sequence.encoder_inputs:
                self._release_items(sequence)
        done = [sequence for sequence in gained if sequence.finished]
        for sequence in done:
            self.running.remove(sequence)
            self._release(sequence)
        return gained

    def take_events(self) -> list[KvEvent]:
        return self.pool.take_events()

    def _schedule_running(self, step: SimulatedStep) -> bool:
        """Return False if a sequence was preempted: no waiting one is started then."""
        index, preempted = 0, False
        while index < len(self.running) and self._token_budget > 0:
            sequence = self.running[index]
            if sequence.num_new == 1 and self._stays_in_block(sequence):
                self._add_work(step, sequence, 1, [])
                index += 1
                continue
            num_tokens = min(sequence.num_new, self._token_budget)
            inputs, num_tokens = self._plan_encoder(sequence, sequence.num_computed, num_tokens)
            if num_tokens == 0:
                index += 1
                continue
            while not self._has_room(sequence, num_tokens):
                preempted = True
                last = self.running.pop()  # never one already in this step: those come before `index`
                self._preempt(last)
                if last is sequence:
                    return False
            self._extend(sequence, num_tokens)
            self._add_work(step, sequence, num_tokens, inputs)
            index += 1
        return not preempted

    def _stays_in_block(self, sequence: SimulatedSequence) -> bool:
        """Fast path of decoding: whether the next token neither starts nor fills a block and is after all items."""
        position = sequence.num_computed % self._block_size
        return 0 < position < self._block_size - 1 and sequence.num_computed >= sequence.items_end

    def _schedule_waiting(self, step: SimulatedStep) -> None:
        while self.waiting and self._token_budget > 0 and len(self.running) < self._max_num_seqs:
            sequence = self.waiting[0]
            cached = self.pool.find(sequence.cacheable_ids())
            num_cached = len(cached) * self._block_size
            start = num_cached
            if sequence.num_preemptions == 0:  # what it has received is lost with its blocks
                start = sequence.num_cached_tokens = max(num_cached, sequence.num_received)
                sequence.num_transferred = start - num_cached
            num_tokens = min(len(sequence.token_ids) - start, self._token_budget)
            inputs, num_tokens = self._plan_encoder(sequence, start, num_tokens)
            if num_tokens == 0:
                return
            if not self._fits_whole(sequence, cached):
                self._release_all_items(sequence)
                return
            self.waiting.popleft()
            self.pool.use(cached)
            sequence.start(cached)
            self.running.append(sequence)
            if start > num_cached:
                self._extend(sequence, start - num_cached)
                sequence.num_computed = start
            self._extend(sequence, num_tokens)
            self._add_work(step, sequence, num_tokens, inputs)

    def _plan_encoder(self, sequence: SimulatedSequence, start: int, num_tokens: int) -> tuple[list[int], int]:
        """Return the items to encode for tokens [start, start + num_tokens), and how many of these can be computed.

        An item without encoder cache space or budget ends the chunk before it. Items that are loaded need no budget.
        """
        if start >= sequence.items_end:
            return [], num_tokens
        planned: dict[str, int] = {}
        repeated: list[int] = []
        end = start + num_tokens
        for index, item in enumerate(sequence.items):
            if item.placeholder.end <= start or item.placeholder.offset >= end:
                continue
            if item.mm_hash in planned:
                repeated.append(index)
                continue
            if self.encoder_cache.use(item.mm_hash, sequence.request_id):
                sequence.encoder_inputs.add(index)
                continue
            items = [item, *(sequence.items[i] for i in planned.values())]
            total = sum(item.placeholder.num_embeds for item in items)
            to_encode = sum(item.placeholder.num_embeds for item in items if not item.is_embedded)
            if to_encode > self._encoder_budget or not self.encoder_cache.make_room(total):
                num_tokens = max(0, item.placeholder.offset - start)
                break
            if item.needs(start, end):
                planned[item.mm_hash] = index
        return [*planned.values(), *repeated], num_tokens

    def _add_work(self, step: SimulatedStep, sequence: SimulatedSequence, num_tokens: int, inputs: list[int]) -> None:
        """Add the tokens and planned items to the step, and allocate encoder cache space for the items."""
        step.tokens[sequence] = num_tokens
        self._token_budget -= num_tokens
        if num_tokens == 1 and sequence.num_computed >= sequence.num_prompt_tokens:
            step.num_decode_tokens += 1
        else:
            step.num_prefill_tokens += num_tokens
            step.num_prefill_pairs += num_tokens * sequence.num_computed + num_tokens * num_tokens // 2
        for index in inputs:
            item = sequence.items[index]
            sequence.encoder_inputs.add(index)
            if item.mm_hash in self.encoder_cache:
                continue  # occurs twice in the prompt
            size = item.placeholder.num_embeds
            self.encoder_cache.add(item.mm_hash, size, sequence.request_id)
            if item.is_embedded:
                step.num_loaded_embeds += size
                continue
            self._encoder_budget -= size
            step.num_embeds += size

    def _extend(self, sequence: SimulatedSequence, num_tokens: int) -> None:
        """Allocate blocks for the next tokens, and store blocks that will be full."""
        total = sequence.num_computed + num_tokens
        missing = self._num_blocks(total) - len(sequence.blocks)
        if missing > 0:
            sequence.blocks += self.pool.take(missing)
        sequence.store_full(self.pool, total)

    def _has_room(self, sequence: SimulatedSequence, num_tokens: int) -> bool:
        missing = self._num_blocks(sequence.num_computed + num_tokens) - len(sequence.blocks)
        return missing <= self.pool.num_free

    def _fits_whole(self, sequence: SimulatedSequence, cached: list[Block]) -> bool:
        """Return whether all tokens fit; free blocks in `found` do not count as free."""
        missing = self._num_blocks(len(sequence.token_ids)) - len(cached)
        return missing + sum(block.num_users == 0 for block in cached) <= self.pool.num_free

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _preempt(self, sequence: SimulatedSequence) -> None:
        self._release(sequence)
        sequence.num_preemptions += 1
        self.waiting.appendleft(sequence)

    def _release(self, sequence: SimulatedSequence) -> None:
        """Free the blocks in reverse, so that the last one is evicted first."""
        self._release_all_items(sequence)
        self.pool.free(reversed(sequence.restart()))

    def _release_items(self, sequence: SimulatedSequence) -> None:
        """Release the items whose tokens are all in the KV cache."""
        for index in [i for i in sequence.encoder_inputs if sequence.items[i].placeholder.end <= sequence.num_computed]:
            self._release_item(sequence, index)

    def _release_all_items(self, sequence: SimulatedSequence) -> None:
        for index in list(sequence.encoder_inputs):
            self._release_item(sequence, index)

    def _release_item(self, sequence: SimulatedSequence, index: int) -> None:
        sequence.encoder_inputs.discard(index)
        mm_hash = sequence.items[index].mm_hash
        if all(sequence.items[i].mm_hash != mm_hash for i in sequence.encoder_inputs):
            self.encoder_cache.release(mm_hash, sequence.request_id)
