"""A file over bytes in memory, which decoders read without a copy of the whole."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class MemoryFile(io.RawIOBase):
    """Like `io.BytesIO`, but copies only what is read, and ignores a `seek` to before the start.

    Libraries seek to invalid offsets from damaged files; an exception inside their callbacks would be printed.
    """

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data = data
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        into = memoryview(buffer)
        part = self._data[self._position : self._position + len(into)]
        into[: len(part)] = part
        self._position += len(part)
        return len(part)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._data)}[whence]
        if start + offset >= 0:
            self._position = start + offset
        return self._position
