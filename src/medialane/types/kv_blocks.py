"""Blocks of the KV cache: their ids, and the events of engines and workers.

An engine reports full blocks by its own hashes (`KvEventBatch`). Its worker converts them to our block ids and forwards
only ids (`KvChange`). A block id is a 64-bit hash that identifies a full block and the whole prompt up to its end.

Ids do not depend on an engine's hash function. The same ids are computed from a prompt (`prompt_block_ids`) and from
an engine's KV events (`stored_block_ids`), so a gateway can look up which workers hold a prefix. An id covers the
tokens, the media items that overlap the block and their offsets, LoRA, `cache_salt` and the block size.

Recipe, all mod 2^64. A block's content is `c = fmix64(sum_k a_k * token_k + sum_items fmix64(digest + C * offset))`,
offset relative to the block's start; the chain is `h_i = K * h_(i-1) + c_i`, starting from a digest of salt, LoRA and
block size. An id is the whole state of its chain, so an event's ids continue from the id of the parent block.

Equal prefixes have equal ids. Unequal prefixes collide with probability 2^-64 per pair, except by deliberate attack:
the constants are public. A collision can route a request to a suboptimal worker, but never changes its output.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from medialane.types.feature import MediaSpan

#: Our ids of KV blocks, one dimension.
BlockIds = NDArray[np.uint64]

Words = NDArray[np.uint64]
Positions = NDArray[np.int64]

#: The chain's multiplier: odd and 5 mod 8, like multipliers of linear congruential generators.
_K: Final = 0xD1342543DE82EF95
#: Spreads offsets: 2^64 over the golden ratio.
_C: Final = np.uint64(0x9E3779B97F4A7C15)
#: fmix64 of MurmurHash3 (public domain): a bijection in which every bit of the input moves half of the output's.
_FMIX_1: Final = 0xFF51AFD7ED558CCD
_FMIX_2: Final = 0xC4CEB9FE1A85EC53
_SHIFT: Final = np.uint64(33)
_MASK: Final = (1 << 64) - 1
#: Up to this number of blocks, plain integers are faster than arrays; most KV events have one block.
_FEW: Final = 4


def token_sums(tokens: NDArray[np.uint32], coefficients: Words) -> Words:
    """Return sum_k a_k * token_k of every full block, with one coefficient per position in a block."""
    size = len(coefficients)
    num_blocks = len(tokens) // size
    sums: Words = tokens[: num_blocks * size].reshape(num_blocks, size).astype(np.uint64) @ coefficients
    return sums


def add_media(sums: Words, block_size: int, *, offsets: Positions, ends: Positions, digests: Words) -> None:
    """Add to each block the items that overlap it, in the way of vLLM's `_gen_mm_extra_hash_keys`. Its edge cases
    matter where ranges overlap (audio inside its video): an item that extends past the block hides items after it, and
    nothing is added after the end of the last item. Items are sorted by offset."""
    num_blocks = min(len(sums), -(-ends.item(-1) // block_size))
    hidden = 0
    for offset, end, digest in zip(offsets.tolist(), ends.tolist(), digests, strict=True):
        first, last = max(offset // block_size, hidden), min(num_blocks, -(-end // block_size))
        if first < last:
            relative = offset - np.arange(first, last) * block_size
            sums[first:last] += _fmix(digest + relative.astype(np.uint64) * _C)
        hidden = max(hidden, (end - 1) // block_size)


def add_overlaps(sums: Words, blocks: Positions, digests: Words, offsets: Positions) -> None:
    """Add items listed per block, with their offsets relative to the block. A block may have several."""
    np.add.at(sums, blocks, _fmix(digests + offsets.astype(np.uint64) * _C))


def chain(sums: Words, start: int) -> None:
    """Replace each sum by its id: h_i = K * h_(i-1) + fmix64(sum_i), where h_(-1) is `start`.

    K is invertible, so h_i = K^(i+1) * (start + sum_(j<=i) K^-(j+1) * fmix64(sum_j)): one cumulative sum.
    """
    if len(sums) <= _FEW:
        sums[:] = _chain_few(sums.tolist(), start)
        return
    powers, inverses = _powers(1 << max(len(sums) - 1, 1).bit_length())
    _fmix(sums)
    sums *= inverses[: len(sums)]
    np.cumsum(sums, out=sums)
    sums += np.uint64(start)
    sums *= powers[: len(sums)]


def _chain_few(sums: list[int], start: int) -> list[int]:
    ids = []
    for content in sums:
        mixed = (content ^ content >> 33) * _FMIX_1 & _MASK
        mixed = (mixed ^ mixed >> 33) * _FMIX_2 & _MASK
        start = (_K * start + (mixed ^ mixed >> 33)) & _MASK
        ids.append(start)
    return ids


def _fmix(values: Words) -> Words:
    values ^= values >> _SHIFT
    values *= np.uint64(_FMIX_1)
    values ^= values >> _SHIFT
    values *= np.uint64(_FMIX_2)
    values ^= values >> _SHIFT
    return values


@lru_cache(maxsize=32)
def _powers(count: int) -> tuple[Words, Words]:
    """Return K^1, K^2, ... and the powers of its inverse."""
    return _powers_of(_K, count), _powers_of(pow(_K, -1, 1 << 64), count)


def _powers_of(base: int, count: int) -> Words:
    powers: Words = np.full(count, base, np.uint64).cumprod(dtype=np.uint64)
    powers.flags.writeable = False
    return powers


_U64 = np.dtype("<u8")


def prompt_block_ids(
    token_ids: Sequence[int] | NDArray[np.uint32],
    *,
    block_size: int,
    media: Sequence[MediaSpan] = (),
    lora: str | None = None,
    cache_salt: str | None = None,
) -> BlockIds:
    """Return the ids of the prompt's full blocks, in order. Two prompts share ids exactly where an engine may share
    their blocks.

    `token_ids` are expanded (with every placeholder token). Pass a uint32 array to avoid the conversion of a list,
    which costs more than the hash. `lora` is the engine's name of the adapter; an empty `lora` or `cache_salt` is the
    same as None. Raises OverflowError for a token id outside [0, 2^32).
    """
    ids = token_sums(token_array(token_ids), _coefficients(block_size))
    if media:
        _add_media(ids, sorted(media, key=lambda item: item.offset), block_size)
    chain(ids, _start(block_size, lora or "", cache_salt or ""))
    return ids


def stored_block_ids(
    token_ids: Sequence[int] | NDArray[np.uint32],
    *,
    block_size: int,
    extra_keys: Sequence[Sequence[object] | None] | None,
    lora_name: str | None,
    parent: int | None,
) -> BlockIds:
    """Return the same ids from a `BlockStored` event (fields as in vLLM); `parent` is our id of the block before the
    first, None at a prompt's start.

    Raises ValueError if tokens and keys do not cover whole blocks, or a key is of an unknown kind.
    """
    if len(token_ids) % block_size:
        raise ValueError("a stored event's tokens are not whole blocks")
    ids = token_sums(token_array(token_ids), _coefficients(block_size))
    salt = ""
    if extra_keys is not None:
        if len(extra_keys) != len(ids):
            raise ValueError("a stored event must have one entry of extra keys per block")
        salt = _add_extra_keys(ids, extra_keys, lora_name, first=parent is None)
    chain(ids, _start(block_size, lora_name or "", salt) if parent is None else parent)
    return ids


def token_array(token_ids: Sequence[int] | NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return token ids as uint32. Raises OverflowError for an id outside [0, 2^32)."""
    if isinstance(token_ids, np.ndarray):
        return token_ids.astype(np.uint32, copy=False)
    # Half the time of np.array(list), which first searches for a common type of the elements.
    return np.frombuffer(array("I", token_ids), dtype=np.uint32)


def _add_media(sums: BlockIds, items: Sequence[MediaSpan], block_size: int) -> None:
    add_media(
        sums,
        block_size,
        offsets=np.array([item.offset for item in items], np.int64),
        ends=np.array([item.end for item in items], np.int64),
        digests=np.array([_digest(item.mm_hash) for item in items], _U64),
    )


def _add_extra_keys(
    sums: BlockIds, extra_keys: Sequence[Sequence[object] | None], lora_name: str | None, *, first: bool
) -> str:
    """Add the overlaps listed by an event; return the salt, which is in the keys of a prompt's first block."""
    salt = ""
    blocks: list[int] = []
    digests: list[int] = []
    offsets: list[int] = []
    for block, keys in enumerate(extra_keys):
        texts = [key for key in keys or () if isinstance(key, str)]
        if lora_name and texts[:1] == [lora_name]:
            del texts[0]
        if texts:
            if not first or block or len(texts) > 1:
                raise ValueError("a stored event has an unknown extra key")
            salt = texts[0]
        for digest, offset in _overlaps(keys or ()):
            blocks.append(block)
            digests.append(digest)
            offsets.append(offset)
    if blocks:
        add_overlaps(sums, np.array(blocks, np.int64), np.array(digests, _U64), np.array(offsets, np.int64))
    return salt


def _overlaps(keys: Iterable[object]) -> Iterable[tuple[int, int]]:
    """Yield (digest, offset) of every item in a block's keys. Prompt embeddings (bytes) count as an item too."""
    for key in keys:
        match key:
            case str():
                continue
            case bytes():
                yield _digest(key), 0
            case [str(mm_hash), int(offset)]:
                yield _digest(mm_hash), offset
            case _:
                raise ValueError("a stored event has an unknown extra key")


@lru_cache(maxsize=64)
def _coefficients(block_size: int) -> BlockIds:
    """One coefficient per position in a block; odd, so that the product is injective in the token."""
    drawn = blake3(b"medialane-block-coefficients-1").digest(length=8 * block_size)
    coefficients: BlockIds = np.frombuffer(drawn, _U64) | np.uint64(1)
    coefficients.flags.writeable = False
    return coefficients


@lru_cache(maxsize=1024)
def _start(block_size: int, lora: str, cache_salt: str) -> int:
    return _first_64(msgspec.msgpack.encode(("medialane-block-1", block_size, lora, cache_salt)))


@lru_cache(maxsize=8192)
def _digest(name: str | bytes) -> int:
    """Digest of an mm_hash, or of the engine's digest of prompt embeddings (bytes)."""
    return _first_64(msgspec.msgpack.encode(name))


def _first_64(data: bytes) -> int:
    return int.from_bytes(blake3(data).digest(length=8), "little")


# Events

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
