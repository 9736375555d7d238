"""Array arithmetic of `block_hash`, mod 2^64. Functions modify their argument `sums` in place."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Places = NDArray[np.int64]

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


def add_media(sums: Words, block_size: int, *, offsets: Places, ends: Places, digests: Words) -> None:
    """Add to each block the items that overlap it, in the way of vLLM's `_gen_mm_extra_hash_keys`. Its edge cases
    matter where ranges overlap (audio inside its video): an item that extends past the block hides those after it, and
    nothing is added after the end of the last item. Items are sorted by offset."""
    num_blocks = min(len(sums), -(-ends.item(-1) // block_size))
    hidden = 0
    for offset, end, digest in zip(offsets.tolist(), ends.tolist(), digests, strict=True):
        first, last = max(offset // block_size, hidden), min(num_blocks, -(-end // block_size))
        if first < last:
            relative = offset - np.arange(first, last) * block_size
            sums[first:last] += _fmix(digest + relative.astype(np.uint64) * _C)
        hidden = max(hidden, (end - 1) // block_size)


def add_overlaps(sums: Words, blocks: Places, digests: Words, offsets: Places) -> None:
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
