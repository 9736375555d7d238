"""Best-fit allocator over [0, size) with coalescing. It only computes offsets and accesses no memory.

Free space is a set of *holes*, no two of which are adjacent. They are indexed in three ways: sorted by (size, offset),
so that best fit is one binary search, and by start and by end, so that coalescing is two dictionary lookups. Of equal
holes the lowest is used. Allocated *pieces* are indexed by start and end too, to find neighbours for eviction.
Inserting into the sorted list moves 8 bytes per hole: allocate and free take 3 us at 20 000 holes (2-core machine,
noisy), most of it not for the list.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from medialane.types.tensor import ALIGNMENT, align


class Allocator:
    """Allocates disjoint, aligned pieces of [0, size), at first of [0, usable_bytes) if given. A failed call changes
    nothing."""

    def __init__(self, size_bytes: int, *, usable_bytes: int | None = None) -> None:
        if size_bytes <= 0 or size_bytes % ALIGNMENT:
            raise ValueError(f"an arena of {size_bytes} bytes is not a positive multiple of {ALIGNMENT}")
        self.size_bytes = size_bytes
        self.used_bytes = 0
        self._allocated: dict[int, int] = {}
        self._allocated_before: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        self._hole_at: dict[int, int] = {}
        self._hole_before: dict[int, int] = {}
        self._usable_bytes = 0
        self.extend(size_bytes if usable_bytes is None else usable_bytes)

    @property
    def free_bytes(self) -> int:
        return self.size_bytes - self.used_bytes

    @property
    def largest_hole_bytes(self) -> int:
        return self._by_size[-1][0] if self._by_size else 0

    def allocate(self, nbytes: int) -> int | None:
        """Allocate `nbytes` rounded up to the alignment; return the offset, or None if no hole is large enough."""
        if nbytes <= 0:
            raise ValueError(f"cannot allocate {nbytes} bytes")
        size = align(nbytes)
        index = bisect_left(self._by_size, (size, 0))
        if index == len(self._by_size):
            return None
        hole, offset = self._by_size[index]
        self._remove_hole(offset, hole)
        if hole > size:
            self._add_hole(offset + size, hole - size)
        self._allocated[offset] = size
        self._allocated_before[offset + size] = offset
        self.used_bytes += size
        return offset

    def allocate_at(self, offset: int, nbytes: int) -> None:
        """Allocate the piece at `offset`, behind all others. Raises ValueError if that is not free."""
        end, size = self._usable_bytes, align(nbytes)
        start = self._hole_before.get(end, end)
        if nbytes <= 0 or offset % ALIGNMENT or not start <= offset <= end - size:
            raise ValueError(f"there are no {nbytes} free bytes at {offset}")
        self._remove_hole(start, end - start)
        if offset > start:
            self._add_hole(start, offset - start)
        if offset + size < end:
            self._add_hole(offset + size, end - offset - size)
        self._allocated[offset] = size
        self._allocated_before[offset + size] = offset
        self.used_bytes += size

    def free(self, offset: int) -> None:
        """Free the piece at `offset`. Raises ValueError if there is none (for example, a double free)."""
        size = self._allocated.pop(offset, None)
        if size is None:
            raise ValueError(f"nothing is allocated at {offset}")
        del self._allocated_before[offset + size]
        self.used_bytes -= size
        before = self._hole_before.get(offset)
        if before is not None:
            self._remove_hole(before, offset - before)
            offset, size = before, size + offset - before
        after = self._hole_at.get(offset + size)
        if after is not None:
            self._remove_hole(offset + size, after)
            size += after
        self._add_hole(offset, size)

    @property
    def is_growing(self) -> bool:
        """Whether `extend` can still add memory."""
        return self._usable_bytes < self.size_bytes

    def extend(self, usable_bytes: int) -> None:
        """Allocate from [0, usable_bytes) from now on. Raises ValueError unless it is larger, aligned, within size."""
        start, end = self._usable_bytes, usable_bytes
        if end == start:
            return
        if not start < end <= self.size_bytes or end % ALIGNMENT:
            raise ValueError(f"an arena of {self.size_bytes} bytes cannot be extended from {start} to {end}")
        self._usable_bytes = end
        self._allocated[start] = end - start  # add it as a piece, then free it
        self._allocated_before[end] = start
        self.used_bytes += end - start
        self.free(start)

    def shrink(self, offset: int, nbytes: int) -> None:
        """Shrink the piece at `offset` to `nbytes` rounded up to the alignment.

        Raises ValueError if there is no piece, or it is not longer than that.
        """
        size, left = self._allocated.get(offset, 0), align(nbytes)
        if not 0 < left < size:
            raise ValueError(f"the piece of {size} bytes at {offset} cannot be shrunk to {nbytes}")
        self._allocated[offset] = left
        del self._allocated_before[offset + size]
        self._allocated_before[offset + left] = offset
        self._allocated[offset + left] = size - left  # split off the end as a piece, then free it
        self._allocated_before[offset + size] = offset + left
        self.free(offset + left)

    def extent(self, offset: int) -> tuple[int, int]:
        """Return start and end of the hole that freeing the piece at `offset` would leave."""
        end = offset + self._allocated[offset]
        return self._hole_before.get(offset, offset), end + self._hole_at.get(end, 0)

    def neighbours(self, start: int, end: int) -> Iterator[int]:
        """Yield the offsets of the pieces adjacent to [start, end), at most two."""
        before = self._allocated_before.get(start)
        if before is not None:
            yield before
        if end in self._allocated:
            yield end

    def _add_hole(self, offset: int, size: int) -> None:
        insort(self._by_size, (size, offset))
        self._hole_at[offset] = size
        self._hole_before[offset + size] = offset

    def _remove_hole(self, offset: int, size: int) -> None:
        del self._by_size[bisect_left(self._by_size, (size, offset))]
        del self._hole_at[offset]
        del self._hole_before[offset + size]
