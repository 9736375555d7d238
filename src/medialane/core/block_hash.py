"""Block ids: our 64-bit identity of a full KV block, and with it of the whole prompt up to that block's end.

No engine's hash is assumed. The same ids come from a prompt (`prompt_block_ids`) and from what an engine says that it
stored (`stored_block_ids`), so a gateway can look up what workers hold. An id covers the tokens, the media items that
overlap the block and where they begin, LoRA, `cache_salt` and the block size.

Recipe, all mod 2^64. A block's content is `c = fmix64(sum_k a_k * token_k + sum_items fmix64(digest + C * offset))`,
offset relative to the block's start; a chain is `h_i = K * h_(i-1) + c_i`, which starts at a digest of salt, LoRA and
block size. That recurrence is `h_i = K^(i+1) * (h_start + sum_(j<=i) c_j * K^-(j+1))`, a cumulative sum: no loop over
blocks. Since an id is the whole state of its chain, an event goes on from the id of the block before it.

Equal prefixes have equal ids; unequal ones collide by chance only (2^-64 a pair), unless someone looks for collisions:
the constants are public. What a collision costs is a request routed to the wrong worker, never a wrong answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

BlockIds = NDArray[np.uint64]

_MASK = (1 << 64) - 1
_U64 = np.dtype("<u8")
#: The chain's multiplier, odd so that it has an inverse; 5 mod 8, so that its powers repeat after 2^62 blocks only.
_K = 0xD1342543DE82EF95
_K_INVERSE = pow(_K, -1, 1 << 64)
#: Spreads offsets: 2^64 over the golden ratio.
_C = np.uint64(0x9E3779B97F4A7C15)
#: fmix64 of MurmurHash3 (public domain): a bijection in which every bit of the input moves half of the output's.
_FMIX = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))
_SHIFT = np.uint64(33)

#: What overlaps a block: a digest, and where it begins relative to the block's start.
_Overlaps = tuple[list[int], list[int], list[int]]


class MediaSpan(msgspec.Struct, frozen=True):
    """Where a media item stands in a prompt: tokens [offset, offset + length), half-open.

    `num_embeds` is how many embeddings the encoder makes for it (its tokens less separators).
    """

    mm_hash: str
    offset: int
    length: int
    modality: str = "image"
    num_embeds: int = 0

    @property
    def end(self) -> int:
        return self.offset + self.length


def prompt_block_ids(
    token_ids: Sequence[int] | NDArray[np.uint32],
    *,
    block_size: int,
    media: Sequence[MediaSpan] = (),
    lora: str | None = None,
    cache_salt: str | None = None,
) -> BlockIds:
    """Ids of the prompt's full blocks, in order; two prompts have equal ids as far as an engine may share their blocks.

    `token_ids` are expanded (each item's placeholders included). A list is converted first, which costs more than all
    the rest; uint32 arrays are taken as they are. `lora` is the adapter's name; an empty string is as none, in
    `cache_salt` too. Raises OverflowError for a token id that is none.
    """
    sums = _token_sums(token_array(token_ids), block_size)
    if media:
        _add_media(sums, sorted(media, key=lambda item: item.offset), block_size)
    return _chain(sums, _start(block_size, lora or "", cache_salt or ""))


def stored_block_ids(
    token_ids: Sequence[int] | NDArray[np.uint32],
    *,
    block_size: int,
    extra_keys: Sequence[Sequence[object] | None] | None,
    lora_name: str | None,
    parent: int | None,
) -> BlockIds:
    """The same ids from one stored-block event, whose fields are vLLM's; `parent` is our id of the block before the
    first, None at a prompt's start.

    Raises ValueError when tokens and keys are not those of whole blocks, or a key is of a kind that we do not know.
    """
    if len(token_ids) % block_size:
        raise ValueError("a stored event's tokens are not whole blocks")
    sums = _token_sums(token_array(token_ids), block_size)
    salt = ""
    if extra_keys is not None:
        if len(extra_keys) != len(sums):
            raise ValueError("a stored event has not one entry of extra keys for each block")
        salt = _add_extra_keys(sums, extra_keys, lora_name, first=parent is None)
    return _chain(sums, _start(block_size, lora_name or "", salt) if parent is None else parent)


def token_array(token_ids: Sequence[int] | NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Token ids as uint32. Raises OverflowError for what is not in [0, 2^32)."""
    if isinstance(token_ids, np.ndarray):
        return token_ids.astype(np.uint32, copy=False)
    # Half the time of np.array(list): one type check an element instead of a look for a common type.
    return np.frombuffer(array("I", token_ids), dtype=np.uint32)


def _token_sums(tokens: NDArray[np.uint32], block_size: int) -> BlockIds:
    blocks = len(tokens) // block_size
    wide = tokens[: blocks * block_size].astype(_U64).reshape(blocks, block_size)
    sums: BlockIds = np.matmul(wide, _coefficients(block_size))
    return sums


def _add_media(sums: BlockIds, items: Sequence[MediaSpan], block_size: int) -> None:
    """Add to each block what overlaps it, by vLLM's walk (`_gen_mm_extra_hash_keys`), whose ends matter where ranges
    overlap (audio inside its video): an item that goes on past the block hides those after it, and nothing is added
    from the end of the last item on."""
    num_blocks = min(len(sums), -(-items[-1].end // block_size))
    hidden = 0
    ranges: list[tuple[int, int]] = []
    for item in items:
        first = max(item.offset // block_size, hidden)
        ranges.append((first, max(first, min(num_blocks, -(-item.end // block_size)))))
        hidden = max(hidden, (item.end - 1) // block_size)
    counts = [stop - first for first, stop in ranges]
    blocks = np.concatenate([np.arange(first, stop, dtype=np.int64) for first, stop in ranges])
    offsets = np.repeat(np.array([item.offset for item in items], np.int64), counts) - blocks * block_size
    digests = np.repeat(np.array([_digest(item.mm_hash) for item in items], _U64), counts)
    _add_overlaps(sums, blocks, digests, offsets)


def _add_extra_keys(
    sums: BlockIds, extra_keys: Sequence[Sequence[object] | None], lora_name: str | None, *, first: bool
) -> str:
    """Add the overlaps that an event lists by block; returns the salt, which stands with a prompt's first block."""
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
                raise ValueError("a stored event has an extra key that is not known")
            salt = texts[0]
        for digest, offset in _overlaps(keys or ()):
            blocks.append(block)
            digests.append(digest)
            offsets.append(offset)
    if blocks:
        _add_overlaps(sums, np.array(blocks, np.int64), np.array(digests, _U64), np.array(offsets, np.int64))
    return salt


def _overlaps(keys: Iterable[object]) -> Iterable[tuple[int, int]]:
    """(digest, offset) of every item that a block's keys name; embeddings instead of tokens count as an item, too."""
    for key in keys:
        match key:
            case str():
                continue
            case bytes():
                yield _digest(key), 0
            case [str(mm_hash), int(offset)]:
                yield _digest(mm_hash), offset
            case _:
                raise ValueError("a stored event has an extra key that is not known")


def _add_overlaps(sums: BlockIds, blocks: NDArray[np.int64], digests: BlockIds, offsets: NDArray[np.int64]) -> None:
    np.add.at(sums, blocks, _fmix(digests + offsets.astype(_U64) * _C))


def _chain(sums: BlockIds, start: int) -> BlockIds:
    powers, inverses = _powers(max(1, len(sums) - 1).bit_length())
    found = _fmix(sums)
    found *= inverses[: len(found)]
    np.cumsum(found, out=found)
    found += np.uint64(start)
    found *= powers[: len(found)]
    return found


def _fmix(values: BlockIds) -> BlockIds:
    """fmix64 of each value; `values` are overwritten."""
    for factor in _FMIX:
        values ^= values >> _SHIFT
        values *= factor
    values ^= values >> _SHIFT
    return values


@lru_cache(maxsize=64)
def _powers(bits: int) -> tuple[BlockIds, BlockIds]:
    """K^1, K^2, ... and K^-1, K^-2, ..., 2^bits of each."""
    powers, inverses = (np.cumprod(np.full(1 << bits, base, _U64), dtype=_U64) for base in (_K, _K_INVERSE))
    return _frozen(powers), _frozen(inverses)


@lru_cache(maxsize=64)
def _coefficients(block_size: int) -> BlockIds:
    """One odd number for each place in a block: odd, so that two tokens at one place never have the same product."""
    drawn = blake3(b"medialane-block-coefficients-1").digest(length=8 * block_size)
    return _frozen(np.frombuffer(drawn, _U64) | np.uint64(1))


def _frozen(values: BlockIds) -> BlockIds:
    values.flags.writeable = False
    return values


@lru_cache(maxsize=1024)
def _start(block_size: int, lora: str, cache_salt: str) -> int:
    return _first_64(msgspec.msgpack.encode(("medialane-block-1", block_size, lora, cache_salt)))


@lru_cache(maxsize=8192)
def _digest(name: str | bytes) -> int:
    """Digest of an mm_hash, or of the engine's digest of prompt embeddings (bytes)."""
    return _first_64(msgspec.msgpack.encode(name))


def _first_64(data: bytes) -> int:
    return int.from_bytes(blake3(data).digest(length=8), "little")
