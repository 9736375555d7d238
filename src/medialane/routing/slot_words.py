"""Sets of slots as native code takes them: a bit mask (1 << slot) as words of 64 bits, which may be written to."""

from __future__ import annotations

import numpy as np

from medialane.routing.native_view import Words


def slot_words(mask: int, num_words: int) -> Words:
    """Raises OverflowError if the mask has more bits than that."""
    return np.frombuffer(bytearray(mask.to_bytes(8 * num_words, "little")), np.uint64)
