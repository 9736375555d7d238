"""Numbers in the headers of images. Whatever lies behind the end is an InvalidImage."""

from __future__ import annotations

from medialane.core.errors import InvalidImage


def take(view: memoryview, offset: int, nbytes: int) -> bytes:
    part = bytes(view[offset : offset + nbytes])
    if len(part) < nbytes:
        raise InvalidImage("the image ends within its header")
    return part


def big(view: memoryview, offset: int, nbytes: int) -> int:
    return int.from_bytes(take(view, offset, nbytes), "big")


def little(view: memoryview, offset: int, nbytes: int) -> int:
    return int.from_bytes(take(view, offset, nbytes), "little")
