"""What is put back into a body where something was taken out."""

from __future__ import annotations

from medialane.gateway.scope import REFERENCE_SCHEME

#: Bytes [start, end) of the body become others.
Edit = tuple[int, int, bytes]


def reference(number: int) -> bytes:
    """The JSON string that stands for item `number`."""
    return f'"{REFERENCE_SCHEME}{number}"'.encode()


def edited(body: bytes | bytearray, edits: list[Edit]) -> bytes:
    """The body with its edits, which do not overlap."""
    if not edits:
        return bytes(body)
    view = memoryview(body)
    parts: list[bytes | memoryview] = []
    at = 0
    for start, end, replacement in sorted(edits):
        parts += [view[at:start], replacement]
        at = end
    return b"".join([*parts, view[at:]])
