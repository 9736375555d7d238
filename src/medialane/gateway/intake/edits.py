"""What is put back into a body where something was taken out."""

from __future__ import annotations

import mmap

import numpy as np

from medialane.gateway.scope import REFERENCE_SCHEME

#: What a body stands in.
Buffer = bytes | bytearray | mmap.mmap

#: Bytes [start, end) of the body become others.
Edit = tuple[int, int, bytes]


def reference(number: int) -> bytes:
    """The JSON string that stands for item `number`."""
    return f'"{REFERENCE_SCHEME}{number}"'.encode()


def edited_size(size: int, edits: list[Edit]) -> int:
    """How many bytes `edited` makes of a body of `size` bytes."""
    return size + sum(len(replacement) - (end - start) for start, end, replacement in edits)


def edited(view: memoryview, edits: list[Edit]) -> bytes:
    """The body with its edits, which do not overlap."""
    parts: list[bytes | memoryview] = []
    at = 0
    for start, end, replacement in sorted(edits):
        parts += [view[at:start], replacement]
        at = end
    return b"".join([*parts, view[at:]])


def joined(parts: list[memoryview]) -> bytearray:
    """The parts in one. NumPy copies without the interpreter lock, which `bytes.join` would hold for milliseconds."""
    found = bytearray(sum(map(len, parts)))
    into = np.frombuffer(found, np.uint8)
    at = 0
    for part in parts:
        into[at : at + len(part)] = np.frombuffer(part, np.uint8)
        at += len(part)
    return found
