"""Converts bit masks of slots (1 << slot) to writable arrays of 64-bit words for native code."""

from __future__ import annotations

import numpy as np

from medialane.routing.native_view import Words


def slot_words(mask: int, num_words: int) -> Words:
    """Convert a mask. Raises OverflowError if it has more than `64 * num_words` bits."""
    return np.frombuffer(bytearray(mask.to_bytes(8 * num_words, "little")), np.uint64)
