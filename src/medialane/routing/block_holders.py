"""Allocates and grows the arrays of `native_table.py`: which bits hold which blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from medialane.core.kv_events import BlockIds
from medialane.routing import native_table as native
from medialane.routing.native_table import Holders
from medialane.routing.native_view import Ints, View, Words

_FIRST_LENGTH: Final = 64


class BlockHolders:
    """Holders are bits, 0 to `num_bits`. Ids must be contiguous, writable arrays. Pure."""

    def __init__(self) -> None:
        self._now = Holders(
            table=np.zeros((_FIRST_LENGTH, 2), np.uint64),
            old=_no_table(),
            sets=np.zeros((_FIRST_LENGTH, 1), np.uint64),
            rows=np.zeros((_FIRST_LENGTH, 4), np.int64),
            places=np.zeros(2 * _FIRST_LENGTH, np.int64),
            held=np.zeros(64, np.int64),
            retired=np.zeros(1, np.uint64),
            state=np.zeros(7, np.int64),
        )
        self._now.state[native.NUM_ROWS] = native.FIRST_ROW
        self.view = View(native.LAYOUT)
        self.view.show(*self._now)

    @property
    def num_bits(self) -> int:
        return len(self._now.held)

    @property
    def num_blocks(self) -> int:
        """Distinct blocks held by some bit, including retired bits."""
        return self._state(native.NUM_NEW) + self._state(native.NUM_OLD)

    @property
    def num_entries(self) -> int:
        """Blocks held, summed over the bits that are not retired."""
        return int(self._now.held.sum()) - self.num_stale

    @property
    def num_stale(self) -> int:
        """Blocks still held by retired bits, summed over them."""
        return self._state(native.NUM_STALE)

    def num_held(self, bit: int) -> int:
        return self._now.held.item(bit)

    def holds(self, bit: int, block: int) -> bool:
        return native.holds(self.view.addresses, self._checked(bit), np.uint64(block))

    def store(self, bit: int, ids: BlockIds) -> None:
        """Add these blocks to those that the bit holds."""
        self._apply(native.store, bit, ids)

    def remove(self, bit: int, ids: BlockIds) -> None:
        """Remove these blocks from those that the bit holds."""
        self._apply(native.remove, bit, ids)

    def retire(self, bit: int) -> None:
        """Exclude the bit's blocks from the counts and leave them to `sweep`. The bit must not be used until it holds
        none."""
        native.retire(self.view.addresses, self._checked(bit))

    def reuse(self, bit: int) -> None:
        """Release a retired bit that holds nothing for use."""
        self._now.retired[bit >> 6] &= ~np.uint64(1 << (bit & 63))

    def sweep(self, num_places: int, num_blocks: int) -> None:
        """Do one step: inspect up to `num_places` places and remove retired bits from up to `num_blocks` blocks."""
        while not native.sweep(self.view.addresses, num_places, num_blocks):
            self._add_rows()

    def widen(self, num_bits: int) -> None:
        """Grow to at least this many bits."""
        now = self._now
        words = (num_bits + 63) // 64
        more = words - now.sets.shape[1]
        if more > 0:
            self._replace_arrays(
                sets=np.pad(now.sets, ((0, 0), (0, more))),
                held=np.pad(now.held, (0, 64 * more)),
                retired=np.pad(now.retired, (0, more)),
            )

    def _apply(self, change: Callable[[Ints, int, BlockIds, int], int], bit: int, ids: BlockIds) -> None:
        done, view = 0, self.view.addresses
        self._checked(bit)
        while (done := change(view, bit, ids, done)) < len(ids):
            self._grow()
        if len(self._now.old) > 1 and not self._state(native.NUM_OLD):
            self._replace_arrays(old=_no_table())

    def _checked(self, bit: int) -> int:
        """Return `bit`, or raise IndexError: native code does no bounds checks."""
        if not 0 <= bit < len(self._now.held):
            raise IndexError(f"there is no bit {bit}")
        return bit

    def _grow(self) -> None:
        """Make space for another block or another set. When a table is full, `old` is empty."""
        now = self._now
        if 4 * self._state(native.NUM_NEW) < 3 * len(now.table):
            self._add_rows()
            return
        now.state[native.NUM_OLD], now.state[native.NUM_NEW] = now.state[native.NUM_NEW], 0
        now.state[native.MOVED] = 0
        self._replace_arrays(old=now.table, table=np.zeros((2 * len(now.table), 2), np.uint64))

    def _add_rows(self) -> None:
        now = self._now
        count = len(now.sets)
        self._replace_arrays(
            sets=np.pad(now.sets, ((0, count), (0, 0))),
            rows=np.pad(now.rows, ((0, count), (0, 0))),
            places=np.zeros(4 * count, np.int64),
        )
        native.intern_all(self.view.addresses)

    def _replace_arrays(self, **arrays: Any) -> None:
        """Replace some of the arrays."""
        self._now = self._now._replace(**arrays)
        self.view.show(*self._now)

    def _state(self, place: int) -> int:
        return self._now.state.item(place)


def _no_table() -> Words:
    return np.zeros((1, 2), np.uint64)
