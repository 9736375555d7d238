"""The inner loops of `block_hash`, compiled when this module is imported (`block_hash.warm_up`).

All arithmetic is mod 2^64. Arrays are read and never kept.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numpy.typing import NDArray

from medialane.core.compiled import compiled_for

_U32S = types.Array(types.uint32, 1, "C", readonly=True)
_U64S = types.Array(types.uint64, 1, "C", readonly=True)
_I64S = types.Array(types.int64, 1, "C", readonly=True)
_IDS = types.Array(types.uint64, 1, "C")

#: The chain's multiplier, odd and 5 mod 8, as multipliers of congruential generators are.
_K = np.uint64(0xD1342543DE82EF95)
#: Spreads offsets: 2^64 over the golden ratio.
_C = np.uint64(0x9E3779B97F4A7C15)
#: fmix64 of MurmurHash3 (public domain): a bijection in which every bit of the input moves half of the output's.
_FMIX_1 = np.uint64(0xFF51AFD7ED558CCD)
_FMIX_2 = np.uint64(0xC4CEB9FE1A85EC53)
_SHIFT = np.uint64(33)


@compiled_for(types.uint64(types.uint64))
def _fmix(value: np.uint64) -> np.uint64:
    value ^= value >> _SHIFT
    value *= _FMIX_1
    value ^= value >> _SHIFT
    value *= _FMIX_2
    return value ^ (value >> _SHIFT)


@compiled_for(_IDS(_U32S, _U64S))
def token_sums(tokens: NDArray[np.uint32], coefficients: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """sum_k a_k * token_k of every full block; there are as many coefficients as tokens in a block."""
    size = len(coefficients)
    sums = np.zeros(len(tokens) // size, np.uint64)
    for block in range(len(sums)):
        found = np.uint64(0)
        for place in range(size):
            found += coefficients[place] * np.uint64(tokens[block * size + place])
        sums[block] = found
    return sums


@compiled_for(types.void(_IDS, types.int64, _I64S, _I64S, _U64S))
def add_media(
    sums: NDArray[np.uint64],
    block_size: int,
    offsets: NDArray[np.int64],
    ends: NDArray[np.int64],
    digests: NDArray[np.uint64],
) -> None:
    """Add to each block what overlaps it, by vLLM's walk (`_gen_mm_extra_hash_keys`), whose ends matter where ranges
    overlap (audio inside its video): an item that goes on past the block hides those after it, and nothing is added
    from the end of the last item on. Items stand in the order of their offsets."""
    last = len(ends) - 1
    num_blocks = min(len(sums), -(-ends[last] // block_size))
    hidden = 0
    for item in range(len(offsets)):
        first = max(offsets[item] // block_size, hidden)
        for block in range(first, min(num_blocks, -(-ends[item] // block_size))):
            sums[block] += _fmix(digests[item] + np.uint64(offsets[item] - block * block_size) * _C)
        hidden = max(hidden, (ends[item] - 1) // block_size)


@compiled_for(types.void(_IDS, _I64S, _U64S, _I64S))
def add_overlaps(
    sums: NDArray[np.uint64], blocks: NDArray[np.int64], digests: NDArray[np.uint64], offsets: NDArray[np.int64]
) -> None:
    """Add items that are told by block, each with its offset relative to the block."""
    for n in range(len(blocks)):
        sums[blocks[n]] += _fmix(digests[n] + np.uint64(offsets[n]) * _C)


@compiled_for(types.void(_IDS, types.uint64))
def chain(sums: NDArray[np.uint64], start: np.uint64) -> None:
    """Replace each sum by its id: h_i = K * h_(i-1) + fmix64(sum_i), where h_(-1) is `start`."""
    state = start
    for block in range(len(sums)):
        state = _K * state + _fmix(sums[block])
        sums[block] = state
