"""How two stores speak, over TCP connections that each serve one entry at a time: the messages, and one connection on
either side.

    destination (connects)          source (listens)
    PeerHello               ->
                            <-      PeerWelcome, or PeerRefused and the end of the connection
    OpenEntry(entry)        ->                              check the capability, and hold the entry
                            <-      EntryOpened(value, offers)
    SendPayload(start,stop) ->                              once, unless another mover copies the entry; it may be sent
                                                            with OpenEntry, and is ignored if that is refused
                            <-      these bytes of the payload, without a frame
    CloseEntry              ->                              the payload is received: release the entry
                            <-      EntryClosed             it was held until now, so what was received is valid
                            <-      PeerRefused(error)      instead of EntryOpened; the connection stays usable

A large entry is copied over several connections: each opens it and asks for a part of the payload, which is
`range.nbytes` less the entry's header.

The source ends a hold that lasts too long by closing the connection, and then the destination gets no EntryClosed. Any
other error closes the connection, too: nothing is received from it afterwards. How long a pull may take is known to
both sides: a peer that is stopped or unreachable must not delay a request for much longer than its fallback takes.

A payload goes from arena to arena: it is received by the kernel, or by TLS, straight into the reserved range
(`asyncio.BufferedProtocol`), and sent by sendfile(2) from the arena's file, which TLS replaces by small reads. Both are
done by the event loop, in steps of at most 2 ms of CPU time. Compared with a blocking thread for each connection, on 2
cores, a copy takes 0.76 of the time for 250 kB and 1.0 for 150 MB, over TLS 0.8 and 1.06. Frames and payloads follow
each other, so one task at a time sends, and one receives.

After `abort`, and after a `receive_into` that was cancelled, nothing is written to the payload.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, ClassVar, TypeVar, cast

import msgspec
from msgspec import Meta

from medialane.types.errors import ErrorReport, ProtocolViolation, TransferFailed
from medialane.types.feature import MAX_HEADER_BYTES, Feature, RemoteEntry
from medialane.types.media import EncodedMedia
from medialane.wire.connection import HEADER, append_frame, checked

T = TypeVar("T")

#: Must be equal on both sides; incremented by every incompatible change.
PEER_VERSION = 2

#: Name of the protocol in the handshake that authenticates both sides (`wire.authentication`).
PROTOCOL = "pull"

#: Largest message before and after the peer is authenticated.
MAX_HELLO_BYTES = 4096
MAX_MESSAGE_BYTES = MAX_HEADER_BYTES + (1 << 20)


#: Movers of a store; there are two.
MAX_OFFERS = 8


class PeerHello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`arena` is the connecting store's."""

    arena: str
    version: int = PEER_VERSION


class PeerWelcome(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The source's arena."""

    arena: str


class PeerRefused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    error: ErrorReport


class OpenEntry(msgspec.Struct, frozen=True, array_like=True, tag=True):
    entry: RemoteEntry


class EntryOpened(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`encoded` for encoded bytes, otherwise `feature`, which has an embedding for an embedded entry; their ranges are
    in the source's arena. `offers` is what its movers offer at the moment (`mover.py`), by name."""

    feature: Feature | None = None
    encoded: EncodedMedia | None = None
    offers: Annotated[dict[str, bytes], Meta(max_length=MAX_OFFERS)] = {}


class SendPayload(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Bytes `start` to `stop` of the payload."""

    start: int
    stop: int


class CloseEntry(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class EntryClosed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


ToSource = PeerHello | OpenEntry | SendPayload | CloseEntry
FromSource = PeerWelcome | PeerRefused | EntryOpened | EntryClosed

#: The decoders raise ProtocolViolation.
decode_to_source: Callable[[bytes], ToSource] = checked(msgspec.msgpack.Decoder(ToSource).decode)
decode_from_source: Callable[[bytes], FromSource] = checked(msgspec.msgpack.Decoder(FromSource).decode)


#: For the start of a pull, on a busy machine.
_BASE_S = 5.0
#: The slowest link that is worth using: a network of 100 Mbit/s.
_MIN_BYTES_PER_S = 10e6


def longest_pull_s(nbytes: int) -> float:
    """Return the destination's deadline for a pull, in seconds."""
    return _BASE_S + nbytes / _MIN_BYTES_PER_S


def longest_hold_s(nbytes: int) -> float:
    """Return how long the source holds an entry for a pull, in seconds: longer than any pull of it."""
    return 2 * longest_pull_s(nbytes)


# The connection

#: What is received before it is asked for: most replies, and the beginning of a payload, which is copied then.
_AHEAD_BYTES = 16 << 10
#: The event loop is woken for this many bytes of a payload at once: each wake-up costs as much as copying one packet.
_LOW_WATERMARK_BYTES = 256 << 10
#: Received or sent in one iteration of the event loop, by all connections together: 1.3 and 2 ms; a socket's buffer may
#: have 30 MB. With an eighth of it, large entries take up to 1.7 times as long.
_STEP_BYTES = 4 << 20
_MIN_STEP_BYTES = 256 << 10
_TLS_BYTES = 256 << 10
#: Sent through the transport when the kernel accepts no more: it calls back when that has been sent.
_PROBE_BYTES = 4 << 10
#: Closes without waiting, and drops what was not sent (socket(7), SO_LINGER).
_NO_LINGER = struct.pack("ii", 1, 0)


class PeerConnection(asyncio.BufferedProtocol):
    """`opened` is called when the peer is authenticated. `closed` is done when the connection is lost, and the kernel
    neither sends nor receives on it. Methods raise TransferFailed when it is lost or aborted."""

    #: Payloads that connections of this process send or receive now: they share a step of the event loop.
    _num_moving: ClassVar[int] = 0

    def __init__(self, opened: Callable[[PeerConnection], None] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._opened = opened
        self._transport: asyncio.Transport | None = None
        self._socket: socket.socket  # of the transport: for options and sendfile
        self._is_tls = False
        self._ahead = bytearray(_AHEAD_BYTES)
        self._begin = self._end = 0  # of what was received ahead
        self._payload: memoryview | None = None  # still to be received
        self._asked = 0  # bytes of it in this iteration of the event loop, at most
        self._received: asyncio.Future[None] | None = None
        self._can_send = asyncio.Event()
        self._can_send.set()
        self.closed: asyncio.Future[None] = self._loop.create_future()

    @property
    def is_idle(self) -> bool:
        """Whether it is open, and the peer has sent nothing that was not received."""
        return self._is_open and self._begin == self._end

    async def send(self, *messages: msgspec.Struct) -> None:
        """Send messages; return when the peer reads. Raises ProtocolViolation if one is too large."""
        buffer = bytearray()
        for message in messages:
            append_frame(buffer, message, MAX_MESSAGE_BYTES)
        self._open_transport().write(buffer)
        await self._can_send.wait()

    async def send_file(self, file: int, offset: int, num_bytes: int) -> None:
        """Send a part of an open file. The kernel may refer to its pages until the peer has received them, or the
        connection is closed."""
        end = offset + num_bytes
        with self._moving():
            while offset < end:
                await self._can_send.wait()
                transport = self._open_transport()
                sent = 0 if self._is_tls else self._sendfile(file, offset, end - offset)
                if not sent:
                    piece = os.pread(file, min(end - offset, _TLS_BYTES if self._is_tls else _PROBE_BYTES), offset)
                    if not piece:
                        raise TransferFailed("the arena's file is too short")
                    transport.write(piece)
                    sent = len(piece)
                offset += sent
                if offset < end:
                    await asyncio.sleep(0)  # others' turn

    async def receive(self, decode: Callable[[bytes], T], max_bytes: int = MAX_MESSAGE_BYTES) -> T:
        """Return the next message. Raises ProtocolViolation if it is larger than `max_bytes`, or `decode` does."""
        while (frame := self._next_frame(max_bytes)) is None:
            await self._receive_more()
        return decode(frame)

    async def receive_into(self, payload: memoryview) -> None:
        """Fill `payload`."""
        num_ahead = min(self._end - self._begin, len(payload))
        payload[:num_ahead] = memoryview(self._ahead)[self._begin : self._begin + num_ahead]
        self._begin += num_ahead
        self._payload = payload[num_ahead:]
        try:
            if len(self._payload) > 2 * _LOW_WATERMARK_BYTES:
                self._set_low_watermark(_LOW_WATERMARK_BYTES)
            with self._moving():
                while self._payload:
                    await self._receive_more()
        finally:
            self._payload = None

    def abort(self) -> None:
        """Disconnect, and drop what was not sent. Idempotent."""
        if self._transport is not None:
            with suppress(OSError):  # it is closed already
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self._transport.abort()

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._socket = transport.get_extra_info("socket")
        self._is_tls = transport.get_extra_info("ssl_object") is not None
        if not self._is_tls:  # `send_file` must know whether the transport has sent everything
            self._transport.set_write_buffer_limits(high=0)
        # uvloop reads for the kind of protocol that it had when it began to (set_protocol of uvloop 0.22).
        self._transport.pause_reading()
        self._transport.resume_reading()
        if self._opened is not None:
            self._opened(self)

    def data_received(self, data: bytes) -> None:
        """Called with what has arrived after the handshake in one piece with its end: a PeerHello at most."""
        if len(data) > len(self._ahead):
            self.abort()
            return
        self._ahead[: len(data)] = data
        self.buffer_updated(len(data))

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._payload:
            self._asked = min(self._step_bytes(), len(self._payload))
            return self._payload[: self._asked]
        if self._begin == self._end:
            self._begin = self._end = 0
        return memoryview(self._ahead)[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._payload:
            self._payload = self._payload[nbytes:]
            if len(self._payload) <= _LOW_WATERMARK_BYTES < len(self._payload) + nbytes:
                self._set_low_watermark(1)
            if self._payload:
                if nbytes == self._asked and self._transport is not None:  # uvloop would read up to 32 times
                    self._transport.pause_reading()
                    self._loop.call_soon(self._resume_reading)
                return
        else:
            self._end += nbytes
            if self._end == len(self._ahead) and self._transport is not None:
                self._transport.pause_reading()  # until `_receive_more`
        self._wake()

    def pause_writing(self) -> None:
        self._can_send.clear()

    def resume_writing(self) -> None:
        self._can_send.set()

    def eof_received(self) -> None:
        """The transport closes itself."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._can_send.set()
        self._wake()
        if not self.closed.done():
            self.closed.set_result(None)

    @property
    def _is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def _open_transport(self) -> asyncio.Transport:
        if self._transport is None or self._transport.is_closing():
            raise TransferFailed("the connection to the other store was closed")
        return self._transport

    def _next_frame(self, max_bytes: int) -> bytes | None:
        """Return the next frame if it has arrived; otherwise ensure that it fits into `_ahead`."""
        start = self._begin + HEADER.size
        if start > self._end:
            self._make_space(HEADER.size)
            return None
        (length,) = HEADER.unpack_from(self._ahead, self._begin)
        if length > max_bytes:
            raise ProtocolViolation(f"a frame of {length} bytes was announced, {max_bytes} are allowed")
        if start + length > self._end:
            self._make_space(HEADER.size + length)
            return None
        self._begin = start + length
        return bytes(memoryview(self._ahead)[start : self._begin])

    def _make_space(self, num_bytes: int) -> None:
        if self._begin + num_bytes > len(self._ahead):
            kept = self._ahead[self._begin : self._end]
            self._ahead = kept + bytes(max(_AHEAD_BYTES, num_bytes) - len(kept))
            self._begin, self._end = 0, len(kept)

    def _resume_reading(self) -> None:
        if self._is_open and self._transport is not None:
            self._transport.resume_reading()

    async def _receive_more(self) -> None:
        self._open_transport()
        self._received = self._loop.create_future()
        try:
            self._resume_reading()
            await self._received
        finally:
            self._received = None

    def _wake(self) -> None:
        if self._received is not None and not self._received.done():
            self._received.set_result(None)

    @contextmanager
    def _moving(self) -> Iterator[None]:
        PeerConnection._num_moving += 1
        try:
            yield
        finally:
            PeerConnection._num_moving -= 1

    def _step_bytes(self) -> int:
        return max(_STEP_BYTES // self._num_moving, _MIN_STEP_BYTES)

    def _sendfile(self, file: int, offset: int, num_bytes: int) -> int:
        """Return the number of bytes that the kernel has accepted."""
        try:
            return os.sendfile(self._socket.fileno(), file, offset, min(num_bytes, self._step_bytes()))
        except BlockingIOError:
            return 0
        except OSError as error:
            raise TransferFailed(f"the connection to the other store was lost: {error.strerror}") from error

    def _set_low_watermark(self, num_bytes: int) -> None:
        if self._is_open and not self._is_tls:
            with suppress(OSError):  # it is lost, which `_receive_more` reports
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
