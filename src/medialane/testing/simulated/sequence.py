"""One request in a simulated engine: its tokens, items, blocks and progress; and the KV cache that its blocks are of:
reference counts, prefix lookup and eviction order.

The tokens of an output are a pure function of the seed, the prompt's media and all preceding tokens. So the right
output of any prompt is known, and an output that goes on at another worker is comparable with one that does not: after
a token too few or too many, all others differ.

The KV cache is like vLLM 0.32's (v1/core/block_pool.py): a free block keeps its content until it is reallocated. Free
blocks without content are allocated first, then the least recently freed, for one request its last block first. Equal
blocks computed at the same time are both kept, and reported as stored and removed twice. One block, the null block, is
never used. Blocks without content are only counted, so that the pools of a thousand workers need memory only for cached
blocks.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import msgspec

from medialane.types.errors import InvalidFeature
from medialane.types.feature import EmbeddingUse, MediaSpan, PlaceholderRange
from medialane.types.kv_blocks import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    prompt_block_ids,
    stored_block_ids,
)
from medialane.types.request import EngineRequest


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


#: Output tokens: ordinary ones of any vocabulary, and plain ASCII in the tiny model's.
FIRST_ANSWER_TOKEN, NUM_ANSWER_TOKENS = 264, 240


class AnswerTokens:
    """The tokens that follow others. `mm_hashes` are the prompt's items' hashes, in the order of their
    placeholders."""

    def __init__(self, token_ids: Sequence[int], mm_hashes: Iterable[str] = (), seed: int | None = None) -> None:
        self._digest = crc32(array("q", token_ids).tobytes(), crc32(f"{seed} {' '.join(mm_hashes)}".encode()))

    def next(self, excluded: Collection[int] = ()) -> int:
        """Return the next token, which then precedes the others. It is not one of the `excluded`, unless all are."""
        number = self._digest % NUM_ANSWER_TOKENS
        if excluded:
            later = range(number, number + NUM_ANSWER_TOKENS)
            number = next((n for n in later if FIRST_ANSWER_TOKEN + n % NUM_ANSWER_TOKENS not in excluded), number)
        token = FIRST_ANSWER_TOKEN + number % NUM_ANSWER_TOKENS
        self._digest = crc32(token.to_bytes(8, "little"), self._digest)
        return token


def answer_of(token_ids: Sequence[int], num_tokens: int, mm_hashes: Iterable[str] = ()) -> list[int]:
    """Return the output of this many tokens for a prompt, without a seed."""
    tokens = AnswerTokens(token_ids, mm_hashes)
    return [tokens.next() for _ in range(num_tokens)]


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[object] = {}


class _Tokenizer(msgspec.Struct):
    model: _Model


def token_texts(model: str) -> Mapping[int, str]:
    """Return the texts of output tokens in the vocabulary of a model's folder, as far as they are ASCII in a byte-level
    one; empty without such a folder."""
    path = Path(model, "tokenizer.json")
    if not path.is_file():
        return {}
    vocab = msgspec.json.decode(path.read_bytes(), type=_Tokenizer).model.vocab
    texts = {number: text.replace("Ġ", " ") for text, number in vocab.items()} if isinstance(vocab, dict) else {}
    tokens = range(FIRST_ANSWER_TOKEN, FIRST_ANSWER_TOKEN + NUM_ANSWER_TOKENS)
    return {token: texts[token] for token in tokens if texts.get(token, "").isascii() and texts.get(token)}


class SimulatedItem(NamedTuple):
    """A media item of a prompt and its placeholder. If it `is_embedded`, its embeddings are loaded, not computed."""

    mm_hash: str
    placeholder: PlaceholderRange
    modality: str = "image"
    is_embedded: bool = False

    def needs(self, start: int, end: int) -> bool:
        """Return whether one of the prompt's tokens [start, end) is replaced by an embedding of this item."""
        offset, is_embed = self.placeholder.offset, self.placeholder.is_embed
        first, last = max(0, start - offset), min(self.placeholder.length, end - offset)
        return first < last and (is_embed is None or 1 in is_embed[first:last])


class SimulatedParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields used of vLLM's SamplingParams, encoded in msgpack; others are ignored. `max_tokens` None means up to
    max_model_len. A `seed` changes all tokens, as each choice does that has one."""

    max_tokens: int | None = 16
    min_tokens: int = 0
    n: int = 1
    output_kind: int = 0
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    detokenize: bool = True

    def of_choice(self, index: int) -> SimulatedParams:
        """Return the parameters of one of n choices, as vLLM does."""
        seed = None if self.seed is None else self.seed + index
        return msgspec.structs.replace(self, n=1, seed=seed)


def sequence_of(
    request: EngineRequest,
    embeddings: Sequence[EmbeddingUse | None] = (),
    *,
    block_size: int,
    params: SimulatedParams,
    max_tokens: int,
) -> SimulatedSequence:
    """Return the sequence of a request; `embeddings` are its items', or empty. Its output goes on behind what
    was `generated` before, which counts as prompt.

    Raises InvalidFeature for an item without a placeholder inside the prompt.
    """
    token_ids, items = request.prompt.token_ids, []
    for number, media in enumerate(request.prompt.media):
        if media.placeholder is None or media.placeholder.end > len(token_ids):
            raise InvalidFeature("a placeholder ends beyond the prompt")
        embedding = embeddings[number] if embeddings else None
        is_embedded = embedding is not None and embedding.is_filled
        items.append(SimulatedItem(media.mm_hash, media.placeholder, media.modality, is_embedded))
    return SimulatedSequence(
        request.request_id,
        [*token_ids, *request.generated],
        block_size=block_size,
        max_tokens=max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids or (),
        items=sorted(items, key=lambda item: item.placeholder.offset),
        lora=request.adapter,
        cache_salt=request.cache_salt,
        seed=params.seed,
    )


class SimulatedSequence:
    """`items` are in the order of their placeholders. The sequence finishes after `max_tokens` output tokens, or with
    one of `stop_token_ids`, which its first `min_tokens` do not include.

    `blocks` hold the KV cache of `num_computed` tokens; `num_cached_tokens` is the number of prompt tokens found by the
    first prefix lookup (None before), together with `num_transferred` that another engine has computed, of the first
    `num_received`.
    """

    def __init__(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        block_size: int,
        max_tokens: int,
        min_tokens: int = 0,
        stop_token_ids: Collection[int] = (),
        seed: int | None = None,
        items: Sequence[SimulatedItem] = (),
        lora: str | None = None,
        cache_salt: str | None = None,
    ) -> None:
        self.request_id = request_id
        self.token_ids = list(token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_tokens = max_tokens
        self.stop_reason: int | None = None
        self.items = tuple(items)
        self.items_end = max((item.placeholder.end for item in self.items), default=0)
        self.encoder_inputs: set[int] = set()
        self.blocks: list[Block] = []
        self.num_computed = 0
        self.num_cached_tokens: int | None = None
        self.num_received = self.num_transferred = 0
        self.num_preemptions = 0
        self.queued_s = self.scheduled_s = self.first_token_s = 0.0
        self._min_tokens = min_tokens
        self._stop_token_ids = frozenset(stop_token_ids)
        self._answer = AnswerTokens(self.token_ids, [item.mm_hash for item in self.items], seed)
        self._block_size = block_size
        self._lora = lora
        self._cache_salt = cache_salt
        self._num_stored = 0
        spans = [
            MediaSpan(i.mm_hash, i.placeholder.offset, i.placeholder.length, i.modality, i.placeholder.num_embeds)
            for i in self.items
        ]
        ids = prompt_block_ids(
            self.token_ids, block_size=block_size, media=spans, lora=lora, cache_salt=cache_salt or None
        )
        self._ids: list[int] = ids.tolist()

    @property
    def answer(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def finished(self) -> bool:
        return self.stop_reason is not None or len(self.token_ids) - self.num_prompt_tokens >= self.max_tokens

    def append_token(self) -> None:
        """Append the next token of the output."""
        is_early = len(self.token_ids) - self.num_prompt_tokens < self._min_tokens
        token = self._answer.next(self._stop_token_ids if is_early else ())
        self.token_ids.append(token)
        if token in self._stop_token_ids:
            self.stop_reason = token

    @property
    def num_new(self) -> int:
        """Number of tokens that are not computed yet."""
        return len(self.token_ids) - self.num_computed

    def cacheable_ids(self) -> list[int]:
        """Return the ids for prefix lookup. The last token is excluded: it must be computed, to sample the next one."""
        return self._ids[: (len(self.token_ids) - 1) // self._block_size]

    def start(self, prefix: list[Block]) -> None:
        """Start with these blocks of the prefix."""
        self.blocks = list(prefix)
        self._num_stored = len(prefix)
        self.num_computed = len(prefix) * self._block_size

    def restart(self) -> list[Block]:
        """Reset the progress; return the blocks, which the caller frees."""
        blocks, self.blocks = self.blocks, []
        self.num_computed = self._num_stored = 0
        return blocks

    def store_full(self, pool: BlockPool, num_tokens: int) -> None:
        """Store in the pool the blocks that are full once `num_tokens` tokens are computed."""
        first, end = self._num_stored, num_tokens // self._block_size
        if first >= end:
            return
        keys = [self._extra_keys(number) for number in range(first, end)]
        tokens = self.token_ids[first * self._block_size : end * self._block_size]
        if end > len(self._ids):
            self._add_ids(end)
        event = BlockStored(
            [pool.engine_hash(block_id) for block_id in self._ids[first:end]],
            pool.engine_hash(self._ids[first - 1]) if first else None,
            tokens,
            self._block_size,
            medium="GPU",
            lora_name=self._lora,
            extra_keys=keys,
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        )
        pool.store(self.blocks[first:end], self._ids[first:end], event)
        self._num_stored = end

    def _add_ids(self, end: int) -> None:
        """Compute the ids of blocks filled by output tokens, up to block `end`."""
        first = len(self._ids)
        ids = stored_block_ids(
            self.token_ids[first * self._block_size : end * self._block_size],
            block_size=self._block_size,
            extra_keys=[self._extra_keys(number) for number in range(first, end)],
            lora_name=self._lora,
            parent=self._ids[-1] if self._ids else None,
        )
        self._ids += ids.tolist()

    def _extra_keys(self, number: int) -> list[object] | None:
        """Return the extra keys as in vLLM's events: LoRA name, `[mm_hash, offset]` of items in the block, salt."""
        start, end = number * self._block_size, (number + 1) * self._block_size
        if start >= self.items_end and self._lora is None and start:
            return None
        keys: list[object] = [] if self._lora is None else [self._lora]
        keys += [
            [item.mm_hash, item.placeholder.offset - start]
            for item in self.items
            if item.placeholder.offset < end and start < item.placeholder.end
        ]
        if self._cache_salt and start == 0:
            keys.append(self._cache_salt)
        return keys or None
