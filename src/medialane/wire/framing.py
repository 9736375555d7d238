"""Framing of a byte stream, without I/O: four bytes of length (big endian), then that many bytes: msgpack, or raw data.

The length is checked before the frame is buffered, so a peer cannot make us buffer more than one frame of the maximum
size. Frames do not depend on how the stream is split into chunks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TypeVar

import msgspec

from medialane.types.errors import ProtocolViolation

T = TypeVar("T")

HEADER = struct.Struct(">I")

#: First byte of a raw frame. No msgpack document begins with it (its specification: "never used").
RAW = b"\xc1"

_ENCODER = msgspec.msgpack.Encoder()

#: What msgspec raises for bytes that are not such a message: `__post_init__`, invalid UTF-8, and unknown fields nested
#: too deeply included.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError)


def checked(decode: Callable[[bytes | memoryview], T]) -> Callable[[bytes | memoryview], T]:
    """Return the decoder of one side's messages by msgspec's, with ProtocolViolation for what it cannot read."""

    def decode_message(frame: bytes | memoryview) -> T:
        try:
            return decode(frame)
        except UNREADABLE as error:
            raise ProtocolViolation(f"unreadable message: {error}") from error

    return decode_message


class FrameReader:
    """Extracts frames from received chunks: `receive` a chunk, then call `next_frame` until it returns None."""

    def __init__(self, max_frame_bytes: int) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._data: bytes | bytearray = b""
        self._view = memoryview(self._data)
        self._position = 0

    def receive(self, chunk: bytes) -> None:
        """Append a chunk of the stream. Frames returned before stay valid."""
        if self._position == len(self._data):
            self._data = chunk
        elif self._position == 0 and isinstance(self._data, bytearray):
            self._view.release()
            self._data += chunk  # no frame was returned from this buffer, so no memoryview prevents resizing
        else:
            rest = bytearray(self._view[self._position :])
            rest += chunk
            self._data = rest
        self._view = memoryview(self._data)
        self._position = 0

    def next_frame(self) -> memoryview | None:
        """Return the next complete frame without its header, or None. It is a view of the buffer: do not keep it.

        Raises ProtocolViolation if the length in the header exceeds the limit.
        """
        view, start = self._view, self._position + HEADER.size
        if len(view) < start:
            return None
        (length,) = HEADER.unpack_from(view, self._position)
        if length > self.max_frame_bytes:
            raise ProtocolViolation(f"a frame of {length} bytes was announced, {self.max_frame_bytes} are allowed")
        end = start + length
        if len(view) < end:
            return None
        self._position = end
        return view[start:end]


def append_frame(buffer: bytearray, message: msgspec.Struct, max_frame_bytes: int) -> int:
    """Encode `message` as one frame at the end of `buffer`; return the frame's size without its header.

    Raises ProtocolViolation if the frame would be larger than allowed. After any error the buffer is as it was.
    """
    start = len(buffer)
    buffer += bytes(HEADER.size)
    try:
        _ENCODER.encode_into(message, buffer, -1)
        length = len(buffer) - start - HEADER.size
        if length > max_frame_bytes:
            raise ProtocolViolation(f"a message of {length} bytes is larger than the {max_frame_bytes} allowed")
    except BaseException:  # in any case, no partial frame may stay in the buffer
        del buffer[start:]
        raise
    HEADER.pack_into(buffer, start, length)
    return length


def append_raw_frame(buffer: bytearray, data: memoryview) -> None:
    """Append a raw frame with `data`."""
    buffer += HEADER.pack(len(RAW) + data.nbytes)
    buffer += RAW
    buffer += data


def raw_data(frame: memoryview) -> memoryview | None:
    """Return the data of a raw frame; None for the frame of a message."""
    return frame[len(RAW) :] if frame[: len(RAW)] == RAW else None
