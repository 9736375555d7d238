"""Replacements of ranges of a body."""

from __future__ import annotations

import mmap

import numpy as np

#: The memory of a body.
Buffer = bytes | bytearray | mmap.mmap

#: (start, end, replacement): bytes [start, end) of the body are replaced.
Edit = tuple[int, int, bytes]


def edited_size(size: int, edits: list[Edit]) -> int:
    """Return the length in bytes of a body of `size` bytes after its edits."""
    return size + sum(len(replacement) - (end - start) for start, end, replacement in edits)


def edited(view: memoryview, edits: list[Edit]) -> bytes:
    """Return the body with its edits applied, which must not overlap."""
    parts: list[bytes | memoryview] = []
    at = 0
    for start, end, replacement in sorted(edits):
        parts += [view[at:start], replacement]
        at = end
    return b"".join([*parts, view[at:]])


def joined(parts: list[memoryview]) -> bytearray:
    """Concatenate the parts. NumPy releases the GIL while copying; `bytes.join` would hold it for milliseconds."""
    copy = bytearray(sum(map(len, parts)))
    into = np.frombuffer(copy, np.uint8)
    at = 0
    for part in parts:
        into[at : at + len(part)] = np.frombuffer(part, np.uint8)
        at += len(part)
    return copy
