"""Frames on a byte stream, without I/O: four bytes of length (big endian), then so many bytes of msgpack, or raw ones.

The length is checked before the frame is collected, so a peer cannot make us buffer more than one frame of the agreed
size. Any split of the stream gives the same frames.
"""

from __future__ import annotations

import struct

import msgspec

from medialane.core.errors import ProtocolViolation

HEADER = struct.Struct(">I")

#: Begins a frame of raw bytes. No msgpack document begins with it (its specification: "never used").
RAW = b"\xc1"

_ENCODER = msgspec.msgpack.Encoder()


class FrameReader:
    """Collects frames out of received chunks: `receive` a chunk, then take frames until there is none."""

    def __init__(self, max_frame_bytes: int) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._data: bytes | bytearray = b""
        self._position = 0

    def receive(self, chunk: bytes) -> None:
        """Append a chunk of the stream. Frames handed out before stay valid."""
        if self._position == len(self._data):
            self._data = chunk
        elif self._position == 0 and isinstance(self._data, bytearray):
            self._data += chunk  # no frame was taken from this buffer: no view forbids that it grows
        else:
            rest = bytearray(memoryview(self._data)[self._position :])
            rest += chunk
            self._data = rest
        self._position = 0

    def next_frame(self) -> memoryview | None:
        """The next whole frame, without its header, or None. It is a view: decode it and let it go.

        Raises ProtocolViolation for an announced length above the limit.
        """
        data, start = self._data, self._position + HEADER.size
        if len(data) < start:
            return None
        (length,) = HEADER.unpack_from(data, self._position)
        if length > self.max_frame_bytes:
            raise ProtocolViolation(f"a frame of {length} bytes was announced, {self.max_frame_bytes} are allowed")
        end = start + length
        if len(data) < end:
            return None
        self._position = end
        return memoryview(data)[start:end]


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
    except BaseException:  # whatever it was, no half frame may stay before the next message
        del buffer[start:]
        raise
    HEADER.pack_into(buffer, start, length)
    return length


def append_raw_frame(buffer: bytearray, data: memoryview) -> None:
    """Append a frame that brings `data` as they are."""
    buffer += HEADER.pack(len(RAW) + data.nbytes)
    buffer += RAW
    buffer += data


def raw_data(frame: memoryview) -> memoryview | None:
    """What a raw frame brings; None for the frame of a message."""
    return frame[len(RAW) :] if frame[: len(RAW)] == RAW else None
