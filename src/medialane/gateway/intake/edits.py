"""What is put back into a body where something was taken out."""

from __future__ import annotations

import mmap

from medialane.gateway.scope import REFERENCE_SCHEME

_PIECE_BYTES = 1 << 20

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
    """The parts in one, copied a piece at a time: one long copy would hold the interpreter lock."""
    found = bytearray(sum(map(len, parts)))
    at = 0
    for part in parts:
        for start in range(0, len(part), _PIECE_BYTES):
            piece = part[start : start + _PIECE_BYTES]
            found[at : at + len(piece)] = piece
            at += len(piece)
    return found
