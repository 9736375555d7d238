"""A connection between two processes (gateway, worker, store), symmetric: frames, batching, back pressure, liveness.

**Framing** (`FrameReader`, `append_frame`; without I/O). A frame has four bytes of length (big endian), then that many
bytes: msgpack, or raw data. The length is checked before the frame is buffered, so a peer cannot make us buffer more
than one frame of the maximum size. Frames do not depend on how the stream is split into chunks.

**Writing.** Messages are encoded immediately into one buffer, which is written in the next iteration of the event loop,
so the deltas of many requests in one engine step cost one system call. A large buffer is written immediately.
`writable` waits while the peer reads too slowly; callers that do not wait are limited by `max_write_buffer_bytes`,
beyond which the connection is closed. Large content is sent in pieces (`send_in_pieces`), interleaved with messages.

**Liveness.** Missed heartbeats are counted in our own beats, not by the clock: if this process stalls (a loaded
machine, SIGSTOP), it counts no beats, and the peer's bytes buffered in the kernel are read before the next one.

**Registration.** One side sends a hello, the other a welcome or the reason to refuse it. A hello is an array that
begins with its kind and the number of its protocol, in every release: whatever else has changed, the other side can say
which numbers differ (docs/reference/stability.md).

`dial` connects to a process that listens.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from asyncio.staggered import staggered_race
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Generic, Protocol, TypeVar, cast

import msgspec

from medialane import __version__
from medialane.types.errors import MedialaneError, NoWorkerReady, ProtocolViolation, StartupFailed, WorkerLost
from medialane.wire.address import TcpAddress, UnixAddress, parse_address
from medialane.wire.config import RpcConfig
from medialane.wire.security import Authentication, authenticate

logger = logging.getLogger(__name__)

#: A write buffer larger than this is written without waiting for the next iteration of the event loop.
FLUSH_BYTES = 256 * 1024

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


class Peer(Protocol):
    """Callbacks of a connection's owner. All are called from the event loop and must not block."""

    def opened(self, connection: Connection) -> None: ...

    def received(self, frame: memoryview) -> None:
        """Handle one frame, valid only during the call. Raises ProtocolViolation, which closes the connection."""

    def beat(self) -> None:
        """Called at each heartbeat interval; must send a message to the peer."""

    def lost(self, error: MedialaneError) -> None:
        """The connection was closed, by either side. Called once, last."""


class PieceSource(Protocol):
    """Large content that is sent in pieces, one per iteration of the event loop."""

    def append_next(self, buffer: bytearray) -> bool:
        """Append whole frames, at most a few hundred KiB; return False after the last. Called from the event loop."""
        ...


class Connection(asyncio.Protocol):
    """Owns the transport. After the connection is closed, `send` has no effect."""

    def __init__(self, peer: Peer, config: RpcConfig, *, max_frame_bytes: int) -> None:
        self._peer = peer
        self._config = config
        self._frames = FrameReader(max_frame_bytes)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._flushing: asyncio.Handle | None = None
        self._sources: deque[PieceSource] = deque()
        self._pumping: asyncio.Handle | None = None
        self._beating: asyncio.TimerHandle | None = None
        self._num_silent_beats = 0
        self._interval_s, self._timeout_s = config.heartbeat_interval_s, config.heartbeat_timeout_s
        self._error: MedialaneError | None = None
        self._can_write = asyncio.Event()
        self._can_write.set()
        self.closed = asyncio.Event()

    @property
    def num_buffered_bytes(self) -> int:
        """Bytes that the kernel has not accepted yet."""
        waiting = self._transport.get_write_buffer_size() if self._transport is not None else 0
        return len(self._buffer) + waiting

    @property
    def is_closing(self) -> bool:
        """Whether it is closed, or will be as soon as buffered data are written."""
        return self._error is not None

    @property
    def paused(self) -> bool:
        """Whether the peer reads too slowly: wait for `writable` before sending what can wait."""
        return not self._can_write.is_set()

    async def writable(self) -> None:
        """Wait until the peer has read enough, or the connection is closed."""
        await self._can_write.wait()

    def send(self, message: msgspec.Struct, *, at_once: bool = False) -> None:
        """Queue one message. Raises ProtocolViolation, with nothing queued, if it exceeds the frame size limit.

        `at_once` writes it now, with the messages queued before it: for requests, which rarely come in batches.
        """
        if self._error is not None or self.closed.is_set():
            return
        append_frame(self._buffer, message, self._config.max_frame_bytes)
        if at_once or len(self._buffer) > FLUSH_BYTES:
            self._write()
        elif self._flushing is None:
            self._flushing = self._loop.call_soon(self._flush)

    def send_in_pieces(self, source: PieceSource) -> None:
        """Send the pieces of `source`, after earlier sources, as fast as the peer reads, one piece per iteration of the
        event loop. It is dropped when the connection is closed."""
        if self._error is None and not self.closed.is_set():
            self._sources.append(source)
            self._pump_soon()

    def accept_large_frames(self) -> None:
        """Raise the frame size limit to the configured one, once the peer is registered."""
        self._frames.max_frame_bytes = self._config.max_frame_bytes

    def start_heartbeat(self) -> None:
        """Send heartbeats until the connection is closed, and close it if none arrive from the peer."""
        if not self.closed.is_set():
            self._num_silent_beats = 0
            self._beating = self._loop.call_later(self._interval_s, self._beat)

    def end(self, error: MedialaneError) -> None:
        """Close the connection now and drop buffered data. `lost` is called with the first error given."""
        self._error = self._error or error
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Write buffered data, then close. A peer that does not read keeps it open: after a timeout, call `end`."""
        self._write()
        self._error = self._error or WorkerLost("the connection was closed")
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # asyncio's type also covers datagrams
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            config = self._config
            self._interval_s, self._timeout_s = config.tcp_heartbeat_interval_s, config.tcp_heartbeat_timeout_s
        if self._error is not None:  # closed while connecting
            self._transport.abort()
        self._peer.opened(self)

    def data_received(self, data: bytes) -> None:
        self._num_silent_beats = 0
        try:
            self._frames.receive(data)
            while self._error is None and (frame := self._frames.next_frame()) is not None:
                self._peer.received(frame)
        except ProtocolViolation as error:
            logger.warning("ending the connection: %s", error.message)
            self.end(error)

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()
        self._pump_soon()

    def connection_lost(self, exc: Exception | None) -> None:
        for handle in (self._flushing, self._pumping, self._beating):
            if handle is not None:
                handle.cancel()
        self._buffer.clear()
        self._sources.clear()
        self._can_write.set()
        self._error = self._error or WorkerLost("the connection was lost")
        self.closed.set()
        self._peer.lost(self._error)

    def _flush(self) -> None:
        self._flushing = None
        self._write()

    def _write(self) -> None:
        if not self._buffer or self._transport is None or self._error is not None:
            return
        # The transport may keep a reference, so give it this buffer and start a new one.
        data, self._buffer = self._buffer, bytearray()
        self._transport.write(data)
        if self.num_buffered_bytes > self._config.max_write_buffer_bytes + self._config.max_frame_bytes:
            self.end(WorkerLost("the peer does not read"))

    def _pump_soon(self) -> None:
        if self._sources and self._pumping is None:
            self._pumping = self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = None
        if not self._sources or self.paused or self._error is not None:
            return
        if not self._sources[0].append_next(self._buffer):
            self._sources.popleft()
        self._write()
        if not self.paused:  # else `resume_writing` continues
            self._pump_soon()

    def _beat(self) -> None:
        self._num_silent_beats += 1
        if self._num_silent_beats * self._interval_s > self._timeout_s:
            self.end(WorkerLost("missed heartbeats of the peer"))
            return
        self._beating = self._loop.call_later(self._interval_s, self._beat)
        self._peer.beat()


W = TypeVar("W", bound=msgspec.Struct)


class Registration(Generic[W]):
    """The side that sends the hello. `closed` and `too_late` are the errors if registering is cancelled, or if no
    welcome arrives in time."""

    def __init__(self, connection: Connection, *, closed: MedialaneError, too_late: MedialaneError) -> None:
        self._connection = connection
        self._closed, self._too_late = closed, too_late
        self._welcome: asyncio.Future[W] = asyncio.get_running_loop().create_future()

    async def run(self, hello: msgspec.Struct, *, timeout_s: float, connecting: Awaitable[None] | None = None) -> W:
        """Send `hello`, after `connecting`, and return the welcome. Raises what `connecting` raises, and the error with
        which the connection was lost. Cancellation and errors leave no connection behind."""
        try:
            async with asyncio.timeout(timeout_s):
                if connecting is not None:
                    await connecting
                self._connection.send(hello)
                return await self._welcome
        except BaseException as error:  # includes cancellation
            self._welcome.cancel()
            self._connection.end(self._closed)
            if isinstance(error, TimeoutError):
                raise self._too_late from None
            raise

    def welcome(self, message: W) -> None:
        """The peer has registered us. Raises ProtocolViolation for a second welcome."""
        if self._welcome.done():
            raise ProtocolViolation(f"a second {type(message).__name__}")
        self._connection.accept_large_frames()
        self._welcome.set_result(message)
        self._connection.start_heartbeat()

    def lost(self, error: MedialaneError) -> None:
        """The connection was lost, or we were refused."""
        if not self._welcome.done():
            self._welcome.set_exception(error)
            self._welcome.exception()  # a peer that has connected may be lost before anything waits for this


class Beginning(msgspec.Struct, array_like=True):
    """Of a hello. Further elements are not looked at."""

    kind: str
    version: int


_BEGINNING = msgspec.msgpack.Decoder(Beginning)


def other_version(frame: memoryview, kind: str, ours: int) -> int | None:
    """Return the number of another release's protocol if `frame` is its hello, which ours need not be able to read."""
    try:
        beginning = _BEGINNING.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return beginning.version if beginning.kind == kind and beginning.version != ours else None


def check_version(theirs: int, ours: int, names: tuple[str, str]) -> None:
    """Raise StartupFailed unless the versions of the protocol are equal; `names` are what the peer and we are."""
    if theirs != ours:
        raise StartupFailed(
            f"the {names[0]} speaks protocol {theirs}, the {names[1]} {ours} (medialane {__version__}):"
            " install the same release on both"
        )


# Connecting

#: How long one address of a host is tried before the next is, too.
ATTEMPT_DELAY_S = 0.25


async def dial(address: str, protocol: asyncio.BaseProtocol, authentication: Authentication | None = None) -> None:
    """Connect `protocol` to the process at `address`, over TCP when that is authenticated, which needs
    `authentication`. Raises

    * NoWorkerReady: no process listens at the address, and only then;
    * WorkerLost: the address is unreachable;
    * AuthenticationFailed: the peer is not authenticated, or does not accept us;
    * StartupFailed: the address is malformed, or beyond loopback and there is no secret.

    Cancellation and errors leave no connection behind.
    """
    target = parse_address(address)
    try:
        if isinstance(target, UnixAddress):
            await asyncio.get_running_loop().create_unix_connection(lambda: protocol, target.path)
        else:
            if authentication is None:
                raise StartupFailed(f"{address}: only unix:/path is supported here")
            await _dial_tcp(target, protocol, authentication)
    except (ConnectionRefusedError, FileNotFoundError):
        raise NoWorkerReady("no process listens at this address") from None
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise WorkerLost(f"the address cannot be reached: {reason}") from error


async def _dial_tcp(target: TcpAddress, protocol: asyncio.BaseProtocol, authentication: Authentication) -> None:
    """Connect to the first address of the host that accepts, "happy eyeballs" (RFC 8305): one that does not answer, of
    a dead IPv6 route say, only delays the next. Raises ConnectionRefusedError only if all of them refused."""
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    connected: list[socket.socket] = []
    attempts = [
        partial(_connect, family, str(address[0]), target, authentication, connected=connected)
        for family, *_, address in addresses
    ]
    sock = None
    try:
        sock, _, errors = await staggered_race(attempts, ATTEMPT_DELAY_S)
    finally:
        for other in connected:  # the race may be cancelled when one has won, or two may end at once
            if other is not sock:
                other.close()
    if sock is None:
        others = [error for error in errors if error is not None and not isinstance(error, ConnectionRefusedError)]
        raise others[-1] if others else ConnectionRefusedError
    await authenticate(sock, lambda: protocol, authentication, dialled_host=target.host)


async def _connect(
    family: int, ip: str, target: TcpAddress, authentication: Authentication, *, connected: list[socket.socket]
) -> socket.socket:
    """Return the socket, and add it to `connected`, whose owner owns it. Raises OSError, and StartupFailed if the
    address needs a protection that is not set."""
    authentication.security.check_host(ip)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (ip, target.port))
        if sock.getsockname() == sock.getpeername():  # a free port in the ephemeral range may connect to itself (TCP)
            raise ConnectionRefusedError
    except BaseException:
        sock.close()
        raise
    connected.append(sock)
    return sock
